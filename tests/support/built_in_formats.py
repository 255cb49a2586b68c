"""Every format that kvcore comes with, and the channels of a row that tests give it.

Written out: the registry also holds what other tests registered.
"""

FIXED_DIM = {
    "v4_584": 512,
    "v41_528": 512,
    "v41_fp4_288": 512,
    "v32_656": 576,
    "row_580": 512,
    "mxfp4_368": 512,
    "v4_nvfp4_384": 512,
    "v32_nvfp4_352": 576,
    "v32_nvfp4_432": 576,
    "index_fp8_132": 128,
    "index_fp8_132_h": 128,
    "index_fp8_132_fp32scale": 128,
    "index_fp8_132_fp32scale_h": 128,
    "index_fp4_68": 128,
    "index_fp4_68_h": 128,
    "index_nvfp4": 128,
    "index_nvfp4_h": 128,
}
ANY_DIM = {
    "bf16": 64,
    "fp16": 64,
    "fp32": 64,
    "int8_row": 64,
    "fp8_row": 64,
    "nf4_b64": 128,
    "mxfp4": 96,
    "int4_g32": 80,
    "int4_g64": 128,
    "int8_per_token_head": 64,
    "fp8_per_token_head": 64,
    "mxfp8": 96,
    "fp4_mx_block16": 80,
    "nvfp4": 80,
}
OVER_TOKENS = {"int4_ch32": 64, "int4_ch64": 128}
DIM = {**FIXED_DIM, **ANY_DIM, **OVER_TOKENS}
