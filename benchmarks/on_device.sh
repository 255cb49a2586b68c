#!/bin/sh
# Everything that a CUDA device has to say, in one go: checks in parallel processes, timings, the sanitizer.
#   sh benchmarks/on_device.sh OUT_FOLDER [--quick]
out=$1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
for shard in 0 1 2 3 4 5 6; do
    python3 benchmarks/check_cuda.py $2 --shard $shard/7 --out "$out/check-$shard.json" >"$out/check-$shard.log" 2>&1 &
done
wait
tail -n 5 "$out"/check-*.log
python3 -m kvcore bench --out "$out/bench.json" --svg "$out/bench.svg"
for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool python3 benchmarks/small_run.py 2>&1 | tee "$out/$tool.log" | tail -n 4
done
