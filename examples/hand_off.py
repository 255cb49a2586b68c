"""One process prefills with JAX, another decodes with torch: the same request, verified page by page on arrival.

Run it:  python examples/hand_off.py
         python examples/hand_off.py --shards 4      also moves it from one process to four that hold it together
         python examples/hand_off.py --prefill OTHER_PYTHON     where JAX is installed beside another Python

The prefill process exports the request into a folder and hands over a handle of a hundred bytes; nothing else goes
between the two.
"""

import argparse
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import kvcore
from kvcore.handoff import Exporter, FileTransport, decode_handle, encode_handle, publish, pull
from kvcore.spec import presets

SPEC = presets.deepseek_v4_flash_tiny(draft=False, block_tokens=16)
PROMPT = 75


def rows(name: str, numbers: list[int], width: int) -> np.ndarray:
    """What a model would project for these positions, or entries; here a function of their numbers alone."""
    made = np.zeros((len(numbers), width), np.float32)
    for row, number in zip(made, numbers, strict=True):
        row[:] = np.random.default_rng(sum(name.encode()) * 100_003 + number).standard_normal(width, dtype=np.float32)
    return made


def run(cache: kvcore.Cache, request: kvcore.Request, tokens: int) -> None:
    """Bring new tokens through every layer. Entries come compressed, so that every framework stores the same bits."""
    with cache.step({request: tokens}) as step:
        positions = [int(position) for position in kvcore.to_numpy(step.positions)]
        for number, spec in enumerate(SPEC.layers):
            layer = step.layer(number)
            layer.append_window(rows(f"window {number}", positions, spec.window.dim))
            for tail, append in ((spec.tail, layer.append_tail), (spec.index_tail, layer.append_index_tail)):
                if tail is not None:
                    append(*(rows(f"{stream} {number}", positions, tail.width) for stream in ("kv", "score")))
            if spec.entries is not None:
                closed = kvcore.to_numpy(layer.closed.entry_index).tolist()
                keys = rows(f"keys {number}", closed, spec.index_keys.dim) if spec.index_keys else None
                layer.store_entries(rows(f"entries {number}", closed, spec.entries.dim), keys)


def prefill(folder: Path, readers: int, backend: str) -> None:
    """The first process: prompt, export, and it is gone."""
    cache = kvcore.create_cache(SPEC, backend=backend, max_requests=1, max_tokens=256)
    request = cache.admit()
    run(cache, request, PROMPT)
    exporter = Exporter(cache)
    handle = exporter.export(request, lease_seconds=600, readers=readers)
    publish(exporter, handle, folder, readers=readers)
    (folder / "handle").write_bytes(encode_handle(handle))
    where = f"{backend} on {cache.ops.how}"
    print(f"prefill: {PROMPT} tokens, {where}, {handle.pages} pages, digest {cache.digest([request]):016x}")


def decode(folder: Path) -> int:
    """The second process: pull, and go on; returns the digest after 20 more tokens."""
    cache = kvcore.create_cache(SPEC, backend="torch_triton", max_requests=1, max_tokens=256)
    request = pull(cache, decode_handle((folder / "handle").read_bytes()), FileTransport(folder))
    print(f"decode: {request.length} tokens, torch_triton on {cache.ops.how}, digest {cache.digest([request]):016x}")
    for _ in range(20):
        run(cache, request, 1)
    return cache.digest([request])


def decode_together(rank: int, shards: int, folder: str) -> None:
    """One of the processes that hold the request together, each with its own pages of the history."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from kvcore.interop import torch_distributed

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=shards)
    mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("context",))
    cache = torch_distributed.create_cache(SPEC, mesh=mesh, max_requests=1, max_tokens=256)
    handle = decode_handle((Path(folder) / "handle").read_bytes())
    request = torch_distributed.pull(cache, handle, FileTransport(folder), mesh=mesh)
    for _ in range(20):
        run(cache, request, 1)
    digest = cache.digest([request])
    if rank == 0:
        (Path(folder) / "together").write_text(f"{digest:016x}")
    dist.destroy_process_group()


def main() -> None:
    """Start the prefill, decode, and compare with a request that never moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", default=sys.executable, help="the Python that has JAX")
    parser.add_argument("--shards", type=int, default=1, help="processes that take the request over together, too")
    parser.add_argument("--backend", default="jax_pallas", help="that prefills")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        prefill(options.folder, 1 + options.shards, options.backend)
        return
    if options.backend == "jax_pallas" and options.prefill == sys.executable and find_spec("jax") is None:
        print('JAX is not installed here: pip install "kvcore[jax,torch]", or name a Python that has it with --prefill')
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        line = [options.prefill, __file__, "--folder", folder, "--shards", str(options.shards)]
        line += ["--backend", options.backend]
        subprocess.run(line, check=True)
        found = decode(Path(folder))
        stayed = kvcore.create_cache(SPEC, backend="reference", max_requests=1, max_tokens=256)
        request = stayed.admit()
        run(stayed, request, PROMPT + 20)
        print(f"20 tokens later: digests equal to a request that never moved: {found == stayed.digest([request])}")
        if options.shards > 1:
            import multiprocessing

            context = multiprocessing.get_context("spawn")
            arguments = [(rank, options.shards, folder) for rank in range(options.shards)]
            processes = [context.Process(target=decode_together, args=each) for each in arguments]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            together = int((Path(folder) / "together").read_text(), 16)
            print(f"on {options.shards} shards: digests equal: {together == found}")


if __name__ == "__main__":
    main()
