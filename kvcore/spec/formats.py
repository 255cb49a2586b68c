"""What the bytes of one row mean: the format table.

A format lists a row's fields in order. The canonical row is those fields' bytes, one after another, little endian; "the
same bytes" anywhere in kvcore means equal canonical rows. Where the fields of many rows lie in a block is not said here
but in ``layout``. Encoders, decoders, sizes, planners and kernels all read this table and nothing else.
"""

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from typing import Any

import msgspec

from kvcore.errors import SpecError
from kvcore.spec.codes import CODES, RULES, Code, code, largest_kept


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a row.

    Attributes:
        name: ``codes``, ``scales``, ``offsets``, ``rope`` or ``pad`` wherever a format has them.
        dims: elements in the field; None in a format that takes its size from the component.
        code: element code, a key of ``CODES``.
        group: consecutive channels that share a scale; 0 means all of the field's; None means no scale.
        scale: code of the scale, stored in the ``scales`` field.
        rule: how the scale is found, a key of ``RULES``.
        fill: value of every element in a fresh slot or block.
    """

    name: str
    dims: int | None
    code: str
    group: int | None = None
    scale: str | None = None
    rule: str | None = None
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of this field in one row; 4-bit elements take half a byte."""
        return ((self.dims or 0) * self.element.bits + 7) // 8

    @property
    def size(self) -> int:
        """``dims`` of a sized field."""
        assert self.dims is not None, "a field is sized by Format.for_dim"
        return self.dims

    @property
    def width(self) -> int:
        """Channels that share one scale, in a sized field that has scales."""
        return self.group or self.size

    @property
    def groups(self) -> int:
        """Scales that a sized field needs; the last group may be short."""
        return 0 if self.group is None else -(-self.size // self.width)

    @property
    def limit(self) -> float:
        """Magnitude that finite values are clamped to before they are encoded; see ``codes.largest_kept``."""
        return largest_kept(self.code, None if self.group is None else self.rule)

    @property
    def element(self) -> Code:
        """The code of the elements."""
        return CODES[self.code]

    @property
    def scale_element(self) -> Code:
        """The code of the scales of a field that has scales."""
        return CODES[self.scale or ""]

    @property
    def is_value(self) -> bool:
        """True if the field holds channels of the row, as opposed to scales, offsets or padding."""
        return self.name not in ("scales", "offsets", "pad")

    @property
    def has_offsets(self) -> bool:
        """True if every group has an offset beside its scale."""
        return self.group is not None and RULES[self.rule or ""].offset


class Format(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A row of one or more fields.

    Attributes:
        name: key in ``FORMATS``.
        fields: in canonical order. Value fields cover the row's channels in this order.
        planes: field names by plane of the packed page: a plane holds its fields of row 0, then of row 1, and so on;
            planes follow one another.
        page_alignment: a packed page is padded with zeros to a multiple of this, in bytes.
        amax_floor: smallest group maximum that a scale is made from, so that no scale is zero.
        scale_floor: smallest ``amax * fp32(1/largest)`` that a scale is made from, in formats that have their floor
            there; a power-of-two scale is rounded up from it.
        hadamard: encode rotates the row by the orthonormal Hadamard matrix first (decode does not undo it).
        global_scaled: the e4m3 scales are relative to a global fp32 scale given by the component.
        global_scale: that of a part of a component which has several; others say theirs beside the format.
        tokens: a row of more than one is that many tokens of a head, channel by channel: all tokens of the first
            channel, then of the next. A group of ``tokens`` channels of the row is then one channel over time.
    """

    name: str
    fields: tuple[Field, ...]
    planes: tuple[tuple[str, ...], ...]
    page_alignment: int = 1
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    hadamard: bool = False
    global_scaled: bool = False
    global_scale: float = 1.0
    tokens: int = 1

    def __post_init__(self) -> None:
        """Check the field list against itself: names, codes, scales, planes."""
        if [name for plane in self.planes for name in plane] != [field.name for field in self.fields]:
            raise SpecError(
                got=self.planes, where=f"format {self.name}: planes", allowed="every field once, in the fields' order"
            )
        if self.page_alignment < 1:
            raise SpecError(got=self.page_alignment, where=f"format {self.name}: page_alignment", allowed="1 or more")
        if self.tokens < 1:
            raise SpecError(got=self.tokens, where=f"format {self.name}: tokens", allowed="1 or more")
        for field in self.fields:
            self._check_field(field)
        if self.hadamard and self.dim is not None and self.dim & (self.dim - 1):
            raise SpecError(got=self.dim, where=f"format {self.name}: dim", allowed="a power of two, for a rotation")

    def _check_field(self, field: Field) -> None:
        where = f"format {self.name}: field {field.name}"
        kind = code(field.code, where=f"{where}: code")
        if field.dims is not None and field.dims < 1:
            raise SpecError(got=field.dims, where=f"{where}: dims", allowed="1 or more")
        if field.dims is not None and (field.dims * kind.bits) % 8:
            raise SpecError(
                got=field.dims, where=f"{where}: dims", allowed="whole bytes: an even number of 4-bit codes"
            )
        if field.is_value and not kind.largest:
            values = ", ".join(name for name, known in CODES.items() if known.largest)
            raise SpecError(got=field.code, where=f"{where}: code", allowed=f"a code of values: {values}")
        if field.group is None:
            return
        if field.rule not in RULES:
            raise SpecError(got=field.rule, where=f"{where}: rule", allowed=", ".join(RULES))
        if field.scale not in RULES[field.rule].scales:
            stored = " or ".join(RULES[field.rule].scales)
            raise SpecError(got=field.scale, where=f"{where}: scale", allowed=f"{stored}, for rule {field.rule}")
        scales = self.field("scales") if any(other.name == "scales" for other in self.fields) else None
        if scales is None or scales.code != field.scale:
            raise SpecError(got=field.scale, where=f"{where}: scale", allowed="the code of a field named scales")
        if field.dims is not None and scales.dims != field.groups:
            raise SpecError(got=scales.dims, where=f"format {self.name}: scales: dims", allowed=f"{field.groups}")
        offsets = [(other.code, other.dims) for other in self.fields if other.name == "offsets"]
        wanted = [(scales.code, scales.dims)] if RULES[field.rule].offset else []
        if offsets != wanted:
            allowed = (
                f"one of {scales.dims} {scales.code} for rule {field.rule}"
                if wanted
                else f"none, for rule {field.rule}"
            )
            raise SpecError(got=offsets, where=f"format {self.name}: fields named offsets", allowed=allowed)
        if wanted and (sum(other.is_value for other in self.fields) > 1 or kind.signed):
            raise SpecError(
                got=field.code, where=where, allowed=f"one field of values, of codes from 0, for rule {field.rule}"
            )
        if not 0 <= self.scale_floor < largest_kept("fp32", None):
            raise SpecError(got=self.scale_floor, where=f"format {self.name}: scale_floor", allowed="0 or more")
        if self.scale_floor and field.rule not in ("pow2", "fp32", "quotient"):
            allowed = "rule pow2, fp32 or quotient"
            raise SpecError(got=field.rule, where=f"format {self.name}: scale_floor", allowed=allowed)
        if not self.scale_floor and self.amax_floor <= 0:
            raise SpecError(got=self.amax_floor, where=f"format {self.name}: amax_floor", allowed="more than 0")

    @cached_property
    def dim(self) -> int | None:
        """Channels of a row, or None while the format is not yet sized by ``for_dim``."""
        dims = [field.dims for field in self.fields if field.is_value]
        return None if None in dims else sum(dim or 0 for dim in dims)

    @cached_property
    def row_bytes(self) -> int | None:
        """Bytes of a canonical row, pads included; None while the format is not yet sized."""
        return None if self.dim is None else sum(field.nbytes for field in self.fields)

    @property
    def row(self) -> int:
        """``row_bytes`` of a sized format."""
        if self.row_bytes is None:
            raise SpecError(got=self.name, where="format", allowed="a sized format", hint="Call for_dim(dim) first.")
        return self.row_bytes

    @cached_property
    def value_code(self) -> str:
        """``bf16`` where decoding is exact in bf16, else ``fp32``: the dtype of decoded rows."""
        for field in self.fields:
            if not field.is_value:
                continue
            bits = field.element.significand
            if field.has_offsets:
                return "fp32"
            if field.group is not None and not RULES[field.rule or ""].power_of_two:
                bits += field.scale_element.significand
            if bits > CODES["bf16"].significand or self.global_scaled:
                return "fp32"
        return "bf16"

    @cached_property
    def is_plain(self) -> bool:
        """True if a stored row, as it lies, is the decoded row: one bf16 or fp32 number a channel and nothing else."""
        value, *others = self.fields
        return not others and value.group is None and value.code == self.value_code and not self.hadamard

    @property
    def is_fp32(self) -> bool:
        """True if rows are stored as they are computed: then a flush rounds to bf16 nowhere on the way."""
        return all(field.code == "fp32" for field in self.fields)

    def field(self, name: str) -> Field:
        """The field called ``name``."""
        for field in self.fields:
            if field.name == name:
                return field
        raise SpecError(
            got=name, where=f"format {self.name}: field", allowed=", ".join(field.name for field in self.fields)
        )

    def byte_range(self, name: str) -> tuple[int, int]:
        """First and one-past-last byte of a field in the canonical row."""
        start = 0
        for field in self.fields:
            if field.name == name:
                return start, start + field.nbytes
            start += field.nbytes
        raise SpecError(got=name, where=f"format {self.name}: field", allowed=f"{[f.name for f in self.fields]}")

    def for_rows(self, row_bytes: int) -> "Format":
        """This format with a size: its own, or the one that rows of so many bytes have where there is one field only.

        Raises:
            SpecError: a format without a size whose scales take part of the row.
        """
        if self.dim is not None:
            return self
        value, *others = self.fields
        channels = row_bytes * 8 // value.element.bits
        if others or value.group is not None or not channels:
            raise SpecError(
                got="rows without their dim",
                where=f"format {self.name}",
                allowed="a dim: the format takes its size from it",
                hint=f"Pass dim, or FORMATS[{self.name!r}].for_dim(dim) in the format's place.",
            )
        return self.for_dim(channels)

    def for_dim(self, dim: int) -> "Format":
        """This format for rows of ``dim`` channels: itself if it has that size, a sized copy if it is sizeless."""
        return _sized(self, dim)

    def scaled(self, scale: float) -> "Format":
        """This format with a global scale of its own."""
        return self if scale == self.global_scale else _scaled(self, scale)


@cache
def _scaled(format: Format, scale: float) -> Format:
    return msgspec.structs.replace(format, global_scale=scale)


@cache
def _sized(format: Format, dim: int) -> Format:
    if format.dim is not None:
        if format.dim != dim:
            raise SpecError(
                got=dim, where=f"dim for format {format.name}", allowed=f"{format.dim}", hint="Choose another format."
            )
        return format
    fields = [msgspec.structs.replace(field, dims=dim) if field.is_value else field for field in format.fields]
    groups = sum(field.groups for field in fields if field.is_value)
    of_groups = ("scales", "offsets")
    fields = [msgspec.structs.replace(field, dims=groups) if field.name in of_groups else field for field in fields]
    return msgspec.structs.replace(format, fields=tuple(fields))


class Formats(Mapping[str, Format]):
    """The registry: built-in formats plus whatever third parties register."""

    def __init__(self, formats: tuple[Format, ...]) -> None:
        self._formats = {format.name: format for format in formats}

    def __getitem__(self, name: str) -> Format:
        """The format called ``name``; SpecError lists the known ones."""
        if name not in self:
            raise SpecError(
                got=name,
                where="format",
                allowed=", ".join(self._formats),
                hint="Register others with FORMATS.register.",
            )
        return self._formats[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._formats

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def get(self, name: str, default: Format | None = None) -> Format | None:  # type: ignore[override]
        """The format called ``name``, or ``default``."""
        return self._formats.get(name, default)

    def register(self, format: Format) -> Format:
        """Add a format; a different one of the same name is refused."""
        known = self._formats.get(format.name)
        if known is not None and known != format:
            raise SpecError(got=format.name, where="FORMATS.register", allowed="a name that is not taken")
        self._formats[format.name] = format
        return format


def _codes(dims: int | None, code: str, group: int, scale: str, rule: str) -> Field:
    return Field(name="codes", dims=dims, code=code, group=group, scale=scale, rule=rule)


def _scales(dims: int | None, code: str) -> Field:
    return Field(name="scales", dims=dims, code=code)


_ROPE = Field(name="rope", dims=64, code="bf16")
_E4M3_FLOOR = 1e-4
_E2M1_FLOOR = 6 * 2.0**-126
_NVFP4_FLOOR = 6 * 2.0**-9
_MXFP8_FLOOR = 1e-30
_RANGE_FLOOR = 2.0**-100


def _plain(name: str) -> Format:
    return Format(name=name, fields=(Field(name="codes", dims=None, code=name),), planes=(("codes",),))


def _index(
    name: str, codes: Field, scales: Field, floor: float, *, global_scaled: bool = False
) -> tuple[Format, Format]:
    """An indexer-key format and its ``_h`` twin, which rotates keys before encoding."""
    plain = Format(
        name=name,
        fields=(codes, scales),
        planes=(("codes",), ("scales",)),
        page_alignment=576,
        amax_floor=floor,
        global_scaled=global_scaled,
    )
    return plain, msgspec.structs.replace(plain, name=f"{name}_h", hadamard=True)


def _int4(name: str, group: int, tokens: int = 1) -> Format:
    """Four bits from the smallest of a group to its largest; the group is of channels, or of tokens of a channel."""
    return Format(
        name=name,
        fields=(
            _codes(None, "uint4", group, "bf16", "range"),
            _scales(None, "bf16"),
            Field(name="offsets", dims=None, code="bf16"),
        ),
        planes=(("codes",), ("scales", "offsets")),
        amax_floor=_RANGE_FLOOR,
        tokens=tokens,
    )


def _grouped(name: str, code: str, group: int, scale: str, rule: str, **more: Any) -> Format:
    """Channels in groups, each with a scale that lies behind all codes; ``more``: of the format."""
    fields = _codes(None, code, group, scale, rule), _scales(None, scale)
    planes = ("codes",), ("scales",)
    return Format(name=name, fields=fields, planes=planes, **more)


def _per_token_head(name: str, code: str) -> Format:
    """A head of a token with one fp32 scale, found by division, behind its codes."""
    return Format(
        name=name,
        fields=(_codes(None, code, 0, "fp32", "quotient"), _scales(None, "fp32")),
        planes=(("codes", "scales"),),
        scale_floor=1e-6,
    )


FORMATS = Formats(
    (
        _plain("bf16"),
        _plain("fp16"),
        _plain("fp32"),
        # FlashMLA tests/quant.py "MODEL1"; the page of vLLM, SGLang and TokenSpeed.
        Format(
            name="v4_584",
            fields=(
                _codes(448, "e4m3", 64, "e8m0", "pow2"),
                _ROPE,
                _scales(7, "e8m0"),
                Field(name="pad", dims=1, code="zero"),
            ),
            planes=(("codes", "rope"), ("scales", "pad")),
            page_alignment=576,
            amax_floor=_E4M3_FLOOR,
        ),
        # V4.1 window rows: sgl-project/sglang deepseek_v4 kv_layout "V41".
        Format(
            name="v41_528",
            fields=(_codes(512, "e4m3", 32, "e8m0", "pow2"), _scales(16, "e8m0")),
            planes=(("codes",), ("scales",)),
            page_alignment=512,
            amax_floor=_E4M3_FLOOR,
        ),
        # V4.1 compressed entries: the same source, "V41_FP4".
        Format(
            name="v41_fp4_288",
            fields=(_codes(512, "e2m1", 16, "e4m3", "e4m3"), _scales(32, "e4m3")),
            planes=(("codes",), ("scales",)),
            page_alignment=256,
            amax_floor=_NVFP4_FLOOR,
        ),
        # FlashMLA's V3.2 row (tests/quant.py), everything inline; its SM100 kernel needs power-of-two scales. It floors
        # the scale before it is rounded up, not the group's maximum.
        Format(
            name="v32_656",
            fields=(_codes(512, "e4m3", 128, "fp32", "pow2"), _scales(4, "fp32"), _ROPE),
            planes=(("codes", "scales", "rope"),),
            scale_floor=1e-4,
        ),
        # One fp32 scale a row, in three planes; the stored scale multiplies on decode.
        Format(
            name="row_580",
            fields=(_codes(448, "e4m3", 0, "fp32", "fp32"), _ROPE, _scales(1, "fp32")),
            planes=(("codes",), ("rope",), ("scales",)),
            amax_floor=_E4M3_FLOOR,
        ),
        # SGLang pull 37136: MXFP4 main cache, inline.
        Format(
            name="mxfp4_368",
            fields=(
                _codes(448, "e2m1", 32, "e8m0", "pow2"),
                _scales(14, "e8m0"),
                Field(name="pad", dims=2, code="zero"),
                _ROPE,
            ),
            planes=(("codes", "scales", "pad", "rope"),),
            amax_floor=_E2M1_FLOOR,
        ),
        # Indexer keys: DeepGEMM paged MQA logits pages.
        *_index("index_fp8_132", _codes(128, "e4m3", 0, "fp32", "pow2"), _scales(1, "fp32"), _E4M3_FLOOR),
        *_index("index_fp8_132_fp32scale", _codes(128, "e4m3", 0, "fp32", "fp32"), _scales(1, "fp32"), _E4M3_FLOOR),
        *_index("index_fp4_68", _codes(128, "e2m1", 32, "e8m0", "pow2"), _scales(4, "e8m0"), _E2M1_FLOOR),
        *_index(
            "index_nvfp4", _codes(128, "e2m1", 16, "e4m3", "e4m3"), _scales(8, "e4m3"), _E2M1_FLOOR, global_scaled=True
        ),
        # Classic K-V: one row is one head of one token.
        _grouped("int8_row", "int8", 0, "fp32", "fp32", amax_floor=_E4M3_FLOOR),
        _grouped("fp8_row", "e4m3", 0, "fp32", "fp32", amax_floor=_E4M3_FLOOR),
        _grouped("nf4_b64", "nf4", 64, "fp32", "absmax", amax_floor=_E4M3_FLOOR),
        _grouped("mxfp4", "e2m1", 32, "e8m0", "pow2", amax_floor=_E2M1_FLOOR),
        # Four bits with an offset. Over channels: 5.0 and 4.5 bits; over 32 or 64 tokens of one channel: the same.
        _int4("int4_g32", 32),
        _int4("int4_g64", 64),
        _int4("int4_ch32", 32, tokens=32),
        _int4("int4_ch64", 64, tokens=64),
        # vLLM's cache dtypes of these names (triton_reshape_and_cache_flash): a head's scale follows its codes.
        _per_token_head("int8_per_token_head", "int8"),
        _per_token_head("fp8_per_token_head", "e4m3"),
        # FlashInfer pull 4955, for DeepSeek-V4: NVFP4 with rotary channels in bf16, a page's scales behind its codes.
        Format(
            name="v4_nvfp4_384",
            fields=(
                _codes(448, "e2m1", 16, "e4m3", "e4m3"),
                _ROPE,
                _scales(28, "e4m3"),
                Field(name="pad", dims=4, code="zero"),
            ),
            planes=(("codes", "rope"), ("scales", "pad")),
            amax_floor=_NVFP4_FLOOR,
        ),
        # FlashMLA pull 18 in vLLM's repository ("nvfp4.fp8rope"), for V3.2: rotary channels are e4m3 without a scale.
        Format(
            name="v32_nvfp4_352",
            fields=(
                _codes(512, "e2m1", 16, "e4m3", "e4m3"),
                Field(name="rope", dims=64, code="e4m3"),
                _scales(32, "e4m3"),
            ),
            planes=(("codes", "rope", "scales"),),
            amax_floor=_NVFP4_FLOOR,
        ),
        # SGLang's pools of these --kv-cache-dtype, whose scales lie in tensors of their own. Its encoder of the second
        # rounds ties away from zero, which is read alike; the third has scales of a layer's keys, and of its values.
        _grouped("mxfp8", "e4m3", 32, "e8m0", "pow2", amax_floor=_MXFP8_FLOOR),
        _grouped("fp4_mx_block16", "e2m1", 16, "e8m0", "pow2", scale_floor=1e-10),
        _grouped("nvfp4", "e2m1", 16, "e4m3", "e4m3", amax_floor=_E2M1_FLOOR, global_scaled=True),
        # local-inference-lab/vllm pull 82 ("nvfp4_ds_mla"): the row of MLA in four bits, rotary channels in bf16.
        Format(
            name="v32_nvfp4_432",
            fields=(
                _codes(512, "e2m1", 16, "e4m3", "e4m3"),
                _scales(32, "e4m3"),
                Field(name="pad", dims=16, code="zero"),
                _ROPE,
            ),
            planes=(("codes", "scales", "pad", "rope"),),
            amax_floor=_NVFP4_FLOOR,
        ),
    )
)


@cache
def tail_format(width: int) -> Format:
    """The compressor's raw row: ``width`` fp32 kv values, then as many scores; a fresh row has score -inf."""
    return Format(
        name="tail",
        fields=(
            Field(name="kv", dims=width, code="fp32"),
            Field(name="score", dims=width, code="fp32", fill=float("-inf")),
        ),
        planes=(("kv", "score"),),
    )


CHECK_WORD = Format(name="check_word", fields=(Field(name="word", dims=1, code="fp32"),), planes=(("word",),))
"""Four bytes that are no number: what ``kvcore.check_words`` makes of a row."""
