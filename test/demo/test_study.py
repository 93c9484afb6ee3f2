"""The study's machinery: statistics, repeatability, and that interruptions interrupt."""
from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")
pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")

from flashrt_ros.demo import study, study_report
from flashrt_ros.demo.lockstep import Bench


def test_wilson_and_mcnemar() -> None:
    low, high = study_report.wilson(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.2775, abs=1e-4)
    assert study_report.wilson(10, 10)[1] == 1.0
    outcomes = [{'seed': s, 'kind': 'slip', 'method': m, 'success': m == 'restore' or s < 3}
                for s in range(9) for m in ('restore', 'retry')]
    ours, theirs, p = study_report.better(outcomes, 'slip')
    assert (ours, theirs) == (6, 0)
    assert p == pytest.approx(2 / 64)
    assert study_report.better(outcomes[:6], 'slip')[2] == 1.0


@pytest.mark.parametrize('kind', study.KINDS)
def test_a_restored_policy_finishes_what_it_had_begun(kind: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    try:
        outcome = study.Episode(bench, 100_003, kind, 'restore').run()
    finally:
        bench.close()
    assert outcome.interrupted
    assert outcome.success is (kind != 'retarget'), outcome      # the old bin is no longer right


def test_an_episode_repeats_whatever_ran_before_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    try:
        first = study.Episode(bench, 100_001, 'push', 'retry').run()
        study.Episode(bench, 100_002, 'restart', 'restore').run()
        again = study.Episode(bench, 100_001, 'push', 'retry').run()
    finally:
        bench.close()
    assert first == again


def test_the_report_has_a_line_for_each_interruption(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib', reason="pip install 'flashrt_ros[plot]'")
    outcomes = [{'seed': s, 'kind': kind, 'method': method, 'success': s > 0, 'seconds': 9.0 + s,
                 'interrupted': bool(kind), 'scanned_before': s == 1, 'wrong': 'wrong bin'}
                for s in range(4) for kind, method in [('', ''), *(
                    (k, m) for k in study.KINDS for m in study.METHODS)]]
    study_report.write(outcomes, tmp_path, 1.0)
    text = (tmp_path / 'study.md').read_text()
    for title in study_report.TITLES.values():
        assert f'| {title} | 3/4 (30–95 %) | 3/4' in text
    assert (tmp_path / 'study.png').stat().st_size > 5000
    assert '"policy_sha256"' in (tmp_path / 'study.json').read_text()
