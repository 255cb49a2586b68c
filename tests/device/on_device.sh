#!/bin/sh
# Everything that a CUDA device has to say, about fifteen minutes on 16 cores; or some of its parts:
#   KVCORE_COMMIT=$(git rev-parse HEAD) sh tests/device/on_device.sh OUT_FOLDER [checks|reading|times|sanitizer|compile|figures ...]
# Leaves check.json, reading.json, kit.json (of the conformance kit, for kvcore parity), bench.json, bench.svg,
# compile_triton.json (the kernels as this machine's Triton compiles them) and logs.tar.gz there, which also has the records of
# the reliability figures whose rows lie on the device (r-*.json).
# Every step has a timeout of its own; the exit status is 1 if a check failed or a step did not finish.
out=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
logs=$(mktemp -d)
shift
parts=${*:-checks reading times sanitizer compile figures}
status=0
cores=$(getconf _NPROCESSORS_ONLN)
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
cd "$logs" || exit 1

asked() { case " $parts " in *" $1 "*) true ;; *) false ;; esac; }

if asked checks; then
    for shard in 0/6 1/6 2/6 3/6 4/6 5/6 rest; do
        part=check-${shard%/*}
        timeout 240 python3 -m tests.device.check_cuda --shard $shard --out "$part.json" >"$part.log" 2>&1 &
    done
    (cd "$root" && timeout 520 python3 -m tests.conformance.kit_in_parts --backend torch_triton --device cuda --seconds 500 \
        --jobs $((cores > 16 ? cores - 8 : 9)) --gpus "$(nvidia-smi --list-gpus | wc -l)" --out "$logs/kit-0.json") \
        >kit-0.log 2>&1 &
    wait
    tail -q -n 1 check-*.log kit-0.log
fi

if asked reading; then
    timeout 150 python3 -m tests.device.reading_on_device --workers 14 --out "$out/reading.json" >reading.log 2>&1 ||
        echo reading >>failed
    tail -n 1 reading.log
fi

if asked times; then
    { timeout 300 python3 -m kvcore bench --out "$out/bench.json" --svg "$out/bench.svg" 2>&1 || echo bench >>failed; } |
        tee bench.log | grep -v '^  {'
    { timeout 90 python3 -m kvcore.bench.profile "$out/bench.json" 2>&1 || echo profile >>failed; } | tee profile.log
fi

if asked checks || asked reading || asked times; then
    # What there is so far, should the rest be cut off.
    tar czf "$out/logs.tar.gz" ./*.log
fi

if asked sanitizer; then
    for part in $(python3 -m tests.device.small_run --list); do
        # Compiled before: under the sanitizer everything else is slow enough.
        (timeout 200 python3 -m tests.device.small_run "$part" >"small.$part.log" 2>&1
            for tool in memcheck racecheck; do
                timeout "${KVCORE_SANITIZER_SECONDS:-360}" compute-sanitizer --tool $tool python3 -m tests.device.small_run "$part" \
                    >"$tool.$part.log" 2>&1 &
            done
            wait) &
    done
    wait
fi

if asked compile; then
    for gpu in A100 H100 B200; do
        number=0
        # Parts of about as many kernels.
        for which in "flush" "index and not flush" "gather and (row or per_token)" "gather and (v3 or v4)" \
            "gather and not (index or row or per_token or v3 or v4)" "not flush and not gather"; do
            number=$((number + 1))
            part=compile-$gpu-$number
            # Of conftest.py only the kernels' own: the whole suite's takes packages that this machine may lack. A record is
            # written whatever the tests say; one of tests that failed goes, so that the part is missing.
            { (cd "$root" && KVCORE_COMPILE_RECORD="$logs/$part.json" timeout 300 \
                python3 -m pytest -q --confcutdir=tests/kernels -p no:cacheprovider tests/kernels/test_ahead_of_time.py \
                -k "$gpu and $which") >"$part.log" 2>&1 || rm -f "$part.json"; } &
        done
    done
    wait
    tail -q -n 1 compile-*.log
fi

if asked figures; then
    for figure in "corruption --count 15000 --beside no --backend torch_triton --device cuda" \
        "isolation --full --backend torch_triton --device cuda" \
        "replay --full --backends reference,torch_triton@cuda,jax_pallas@cpu"; do
        # shellcheck disable=SC2086 # the options are words
        (JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 timeout 150 python3 -m tests.reliability.$figure \
            --first-seed 100000000 --jobs 4 --seconds 90 --out "r-${figure%% *}.json" >"r-${figure%% *}.log" 2>&1 ||
            echo "$figure" >>failed) &
    done
    wait
fi

if asked checks || asked sanitizer || asked compile; then
    python3 -m tests.device.merge_checks "$out" || status=1
fi
if [ -e failed ]; then
    sed 's/^/failed: /' failed
    status=1
fi
tar czf "$out/logs.tar.gz" $(ls | grep -E '\.log$|^r-.*\.json$')
exit $status
