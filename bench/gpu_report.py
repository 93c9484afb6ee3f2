"""The GPU benchmarks' JSON as Markdown and plots."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_common import size_text

Row = Mapping[str, Any]
Data = Mapping[str, Any]


def write(data: Data, out: Path) -> None:
    """Write benchmarks_gpu.md and its plots below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    plots = draw(data, out)
    (out / 'benchmarks_gpu.md').write_text(markdown(data, plots))


def table(rows: Sequence[Row], columns: Sequence[tuple[str, Callable[[Row], Any]]]) -> str:
    """Return a Markdown table."""
    lines = ['| ' + ' | '.join(h for h, _ in columns) + ' |', '|' + '---|' * len(columns)]
    for r in rows:
        lines.append('| ' + ' | '.join(_cell(f, r) for _, f in columns) + ' |')
    return '\n'.join(lines)


def _cell(f: Callable[[Row], Any], row: Row) -> str:
    try:
        value = f(row)
    except KeyError:
        return ''
    if value is None:
        return '–'
    return f'{value:,.1f}' if isinstance(value, float) else str(value)


def _key(name: str) -> Callable[[Row], Any]:
    return lambda r: r[name]


def _pair(name: str) -> Callable[[Row], Any]:
    return lambda r: f'{r[name + "_p50_us"]:,.1f} / {r[name + "_p95_us"]:,.1f}'


def markdown(data: Data, plots: Mapping[str, str]) -> str:
    """Return the page."""
    f, t = data['facts'], data['tables']
    parts = ['# Benchmarks on a GPU', _method(f), '## Targets', _targets(data['targets'])]

    def section(name: str, title: str, text: str, columns: Sequence[Any]) -> None:
        if name in t:
            parts.extend([f'## {title}', text, table(t[name], columns)])
            if name in plots:
                parts.append(f'![{title}]({plots[name]})')
    size = ('state', lambda r: size_text(r['bytes']))
    section('copies', 'Save and restore on the device', 'Times in µs, p50 / p95. The live set is '
            'overwritten with other bytes before each restore. "One copy" is one '
            '`cudaMemcpyAsync` of the same bytes between two other allocations, launched and timed '
            'by the same code in the same loop, behind a short spin so that the launch is not '
            'counted; "limit" is the time at the bandwidth measured above. Small copies lie in the '
            'cache. Save is called 0.3 ms after a tick, when the device thread waits for the '
            'next.', [
                size, ('buffers', _key('buffers')), ('save, wall', _pair('save_wall')),
                ('restore, GPU', _pair('restore_gpu')),
                ('restore, wall', _pair('restore_wall')),
                ('one copy, GPU', _key('memcpy_gpu_p50_us')),
                ('restore / copy', lambda r: f'{r["restore_over_copy"]:.3f}'),
                ('limit', _key('limit_us')), ('GB/s', _key('gb_per_s'))])
    section('alternatives', 'The same without an arena', 'One torch tensor per buffer; µs, p50, '
            'GPU time except where it says wall. deepcopy has 10 repeats, torch.save 2.', [
                size, ('buffers', _key('buffers')), ('clone each', _key('clone_each_gpu_us')),
                ('copy_ each', _key('copy_each_gpu_us')),
                ('_foreach_copy_', _key('foreach_copy_gpu_us')),
                ('graph of copy nodes', _key('graph_of_copies_gpu_us')),
                ('deepcopy, wall', _key('deepcopy_wall_us')),
                ('torch.save, wall', _key('torch_save_wall_us'))])
    section('tiers', 'Other tiers', 'µs, p50 of 20 repeats (disk: 3). HOST is pinned memory; DISK '
            'is a file that is synced before PERSISTED is said, and read, checked and restored.', [
                size, ('HOST → live, GPU', _key('host_restore_gpu_p50_us')),
                ('GB/s', _key('host_restore_gb_per_s')),
                ('HOST → live, wall', _key('host_restore_wall_p50_us')),
                ('live → HOST, GPU', _key('device_to_host_gpu_p50_us')),
                ('GB/s', _key('device_to_host_gb_per_s')),
                ('save to PERSISTED, wall', _key('disk_save_wall_p50_us')),
                ('load and restore, wall', _key('disk_restore_wall_p50_us'))])
    section('prompts', 'A prompt capsule instead of prefill', 'Wall time from the order to the '
            'first token, ms, p50 / p95; cold: 2 warm-ups, 10 repeats; restored: 5 and 25. Cold is '
            'prefill of the prefix, then of a suffix of 128 tokens; restored is the prefix\'s '
            'capsule, then the same suffix in the same chunk, after the live set was overwritten '
            'by another prompt of the same length. Share: floating-point operations of weights and '
            'attention over time, of the matrix peak above; factors count where it is at least '
            '40 %. Decoding: time per tick over 256 tokens, three rounds turn about, ring on.', [
                ('model', _key('model')), ('tokens', _key('tokens')),
                ('cold', lambda r: f'{r["cold_ms_p50"]} / {r["cold_ms_p95"]}'),
                ('restored', lambda r: f'{r["restored_ms_p50"]} / {r["restored_ms_p95"]}'),
                ('factor', lambda r: f'**{r["factor"]}**' + ('' if r['share_of_peak'] >= 0.4
                                                             else ' (share < 40 %)')),
                ('restore, GPU µs', _key('restore_gpu_us')),
                ('bytes', lambda r: size_text(r['restored_bytes'])),
                ('prefill tokens/s', _key('prefill_tokens_per_s')),
                ('share of peak', lambda r: f'{r["share_of_peak"]:.1%}'),
                ('identical', lambda r: f'{r["identical_tokens"]} of 256'),
                ('tick before, GPU µs (wall)', lambda r: f'{r["tick_before_gpu_us"]:,.1f} '
                                                         f'({r["tick_before_wall_us"]:,.1f})'),
                ('after', lambda r: f'{r["tick_after_gpu_us"]:,.1f} '
                                    f'({r["tick_after_wall_us"]:,.1f})'),
                ('tokens / tick', _key('tokens_per_tick'))])
    section('rollback', 'Rollback by 64 tokens on the live lineage', 'µs, p50 / p95.', [
        ('tokens', _key('tokens')), ('bytes moved', lambda r: size_text(r['bytes'])),
        ('of journals', _key('journal_bytes')), ('GPU', _pair('gpu')), ('wall', _pair('wall'))])
    section('growth', 'A save after n new tokens', 'What the nearest kept ancestor lacks is '
            'copied beside the next tick; µs, p50 of 20.', [
                ('n', _key('tokens')), ('bytes', lambda r: size_text(r['bytes'])),
                ('bytes / token', _key('bytes_per_token')),
                ('save, wall', _key('save_wall_p50_us')),
                ('copy, GPU', _key('copy_gpu_p50_us'))])
    section('ring', 'The ring per token', 'A tick of the 1b decoder with every boundary committed '
            'and with `history: 0`, µs.', [
                ('history', _key('history')), ('tick, wall', _key('tick_wall_p50_us')),
                ('commit, GPU', _key('commit_gpu_us')),
                ('plain STATE', lambda r: size_text(r['bytes']))])
    section('ticks', 'A tick', 'µs. Replay and eager: the program alone. Tick: the session\'s '
            'whole tick on the caller\'s thread and on the device thread (inputs in, program, '
            'outputs out, commit, lengths). "Python": of the tick on the caller\'s thread, what it '
            'did not spend waiting for the card. "Beside": tick less replay.', [
                ('policy', _key('policy')), ('replay, GPU', _pair('replay_gpu')),
                ('launch, Python', _key('launch_python_us')),
                ('eager', _key('eager_gpu_p50_us')),
                ('factor', _key('faster_than_eager')), ('tick, wall', _pair('tick_wall')),
                ('Python', _key('python_us')), ('beside', _key('beside_gpu_us')),
                ('on the thread', _key('threaded_tick_wall_p50_us')),
                ('beside', _key('threaded_beside_gpu_us'))])
    section('ablation', 'What each class of state carries', 'A restore that leaves one class as '
            'it was before, and the first of 64 actions that differs from the uninterrupted run. '
            'The drafting head decides how many tokens a tick emits, never which; a random key '
            'never changes within a session.', [
                ('policy', _key('policy')), ('left out', _key('left_out')),
                ('first divergent action', _key('first_divergent_action')),
                ('different of 64', _key('different_of_64'))])
    if 'ablation' in t:
        idle = [f'{r["left_out"]} ({r["policy"]})' for r in t['ablation']
                if r['first_divergent_action'] is None and r['left_out'] != 'nothing']
        if idle:
            parts.append('Left out without an effect on these actions: ' + ', '.join(idle) + '.')
    return '\n\n'.join(parts) + '\n'


def _method(f: Row) -> str:
    return (f'Measured {f["date"]} on one {f["cuda.device"]} ({f["cuda.arch"]}, '
            f'{f["memory_gib"]} GiB), driver API {f["cuda.driver"]}, torch {f["torch"]}, Python '
            f'{f["python"]}, CPU {f["cpu"]}; {f["seconds"]:.0f} s in all, by '
            '`python -m bench.gpu_capsules`.\n\n'
            'GPU time is between two events on the stream, wall time the caller\'s, both median '
            'and 95th percentile of 50 repeats after 30 warm-ups unless a table says otherwise. '
            f'Ceilings measured in the same run: device copy {f["copy_limit_gb_per_s"]:,.0f} GB/s '
            f'(read and written bytes), BF16 matrix product {f["matrix_peak_tflops"]:,.0f} '
            'TFLOP/s (8192³, random data). Numbers, all rows: '
            '[benchmarks_gpu.json](benchmarks_gpu.json).')


def _targets(targets: Sequence[Row]) -> str:
    return table(targets, [('what', _key('name')), ('target', _key('target')),
                           ('measured', _key('measured')),
                           ('', lambda r: 'met' if r['met'] else '**missed**'),
                           ('note', _key('note'))])


def draw(data: Data, out: Path) -> dict[str, str]:
    """Draw what can be drawn; return file names by table. Nothing without matplotlib."""
    try:
        import matplotlib
        matplotlib.use('Agg')
        from matplotlib import pyplot
    except ImportError:
        return {}
    t, plots = data['tables'], {}

    def figure(name: str, x_label: str, lines: Mapping[str, tuple[Sequence[Any], Sequence[Any]]],
               y_label: str) -> None:
        fig, axes = pyplot.subplots(figsize=(7, 4.2))
        for label, (x, y) in lines.items():
            axes.plot(x, y, marker='o', label=label)
        axes.set(xscale='log', yscale='log', xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3, which='both')
        axes.legend()
        fig.tight_layout()
        fig.savefig(out / f'gpu_{name}.png', dpi=110)
        pyplot.close(fig)
        plots[name] = f'gpu_{name}.png'

    def column(rows: Sequence[Row], key: str) -> list[Any]:
        return [r[key] for r in rows]
    if 'copies' in t and 'alternatives' in t:
        a, b = t['copies'], t['alternatives']
        x = column(a, 'bytes')
        figure('copies', 'bytes of state', {
            'clone each tensor': (x, column(b, 'clone_each_gpu_us')),
            'graph of copy nodes': (x, column(b, 'graph_of_copies_gpu_us')),
            'restore': (x, column(a, 'restore_gpu_p50_us')),
            'one cudaMemcpyAsync': (x, column(a, 'memcpy_gpu_p50_us')),
            'bandwidth limit': (x, column(a, 'limit_us')),
            'save (wall)': (x, column(a, 'save_wall_p50_us'))}, 'µs, median')
    if 'prompts' in t:
        lines = {}
        for model in dict.fromkeys(column(t['prompts'], 'model')):
            rows = [r for r in t['prompts'] if r['model'] == model]
            for how in ('cold', 'restored'):
                lines[f'{model}, {how}'] = (column(rows, 'tokens'), column(rows, f'{how}_ms_p50'))
        figure('prompts', 'tokens of the prompt', lines, 'ms to the first token, median')
    if 'rollback' in t:
        rows = t['rollback']
        figure('rollback', 'tokens in the journal', {
            'GPU': (column(rows, 'tokens'), column(rows, 'gpu_p50_us')),
            'wall': (column(rows, 'tokens'), column(rows, 'wall_p50_us'))}, 'µs, median')
    return plots
