"""All tables of capsules on a GPU, by one command: JSON, Markdown and plots.

    python -m bench.gpu_capsules [--out docs] [--only copies,prompts,…] [--report FILE.json]

GPU time is between events on the card, wall time is the caller's; medians and 95th percentiles of
50 repeats after 30 warm-ups, fewer where the table says so. `--report` draws a finished run again.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
import traceback

SECTIONS = ('copies', 'prompts', 'ticks', 'ablation', 'prompts7b')


def main() -> int:
    """Run the sections asked for, write what they found, return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('docs'))
    parser.add_argument('--only', default=','.join(SECTIONS))
    parser.add_argument('--report', type=Path)
    arguments = parser.parse_args()
    from bench import gpu_report
    if arguments.report is not None:
        gpu_report.write(json.loads(arguments.report.read_text()), arguments.out)
        return 0
    data, failed = measure(arguments.only.split(','))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / 'benchmarks_gpu.json').write_text(json.dumps(data, indent=1) + '\n')
    gpu_report.write(data, arguments.out)
    return int(failed)


def measure(sections: list[str]) -> tuple[dict[str, object], bool]:
    """Return the results as JSON, and whether a section failed."""
    from flashrt_ros.backends import torch_cuda
    torch_cuda.prepare()
    from bench import gpu_ablation, gpu_copies, gpu_prompts, gpu_ticks
    from bench.gpu_common import Results, TimedDevice, copy_limit, facts, matrix_peak
    device = TimedDevice()
    results = Results()
    results.facts.update(facts(device))
    limit, peak = copy_limit(device), matrix_peak()
    results.facts.update(copy_limit_gb_per_s=round(limit, 1), matrix_peak_tflops=round(peak, 1))
    results.note(f'copy limit {limit:.0f} GB/s, matrix peak {peak:.0f} TFLOP/s')

    def prompts(size: str, whole: bool) -> None:
        gpu_prompts.run(results, device, peak, size, whole=whole)
        gpu_prompts.judge(results, size)
    work = {'copies': lambda: gpu_copies.run(results, device, limit),
            'prompts': lambda: prompts('1b', True),
            'ticks': lambda: gpu_ticks.run(results, device),
            'ablation': lambda: gpu_ablation.run(results, device),
            'prompts7b': lambda: prompts('7b', False)}
    failed = False
    for name in sections:
        try:
            work[name]()
        except Exception:   # the other tables are worth having
            failed = True
            traceback.print_exc()
            results.note(f'{name} FAILED')
        sys.stdout.flush()
    return results.as_json(), failed


if __name__ == '__main__':
    sys.exit(main())
