#!/bin/sh
# Everything that a CUDA device has to say, in one go: checks in parallel processes, then timings, then the sanitizer.
#   sh benchmarks/on_device.sh OUT_FOLDER [--quick]
out=$1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
for shard in 0 1 2 3 4 5 6; do
    timeout 230 python3 benchmarks/check_cuda.py $2 --shard $shard/7 --out "$out/check-$shard.json" >"$out/check-$shard.log" 2>&1 &
done
wait
for log in "$out"/check-*.log; do tail -n 5 "$log"; done
timeout 120 python3 -c "
import argparse
from kvcore import bench
parser = argparse.ArgumentParser()
bench.add_arguments(parser)
bench.run(parser.parse_args(['--out', '$out/bench.json', '--svg', '$out/bench.svg']))
" 2>&1 | grep -v '^  {'
for tool in memcheck racecheck; do
    timeout 90 compute-sanitizer --tool $tool python3 benchmarks/small_run.py >"$out/$tool.log" 2>&1
    tail -n 4 "$out/$tool.log"
done
