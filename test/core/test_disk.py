"""P13, P14, P19: the DISK tier, after restarts, kills and hostile files."""
from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.disk import CapsuleFolder, read
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.payload import Tier
from test.conformance.cases import CASES, Case, parameters
from test.conformance.checks import refused


@pytest.mark.parametrize('case', parameters())
def test_p13_a_capsule_returns_after_a_restart(case: Case, tmp_path: Path) -> None:
    events: list[Event] = []
    o = case.session(directory=tmp_path, on_event=events.append)
    o.run(5)
    info = o.session.save('a', persist=True, note='before the risk')
    assert not info.durable
    saved = o.everything()
    never = o.run(6)
    o.close()
    done = [e for e in events if e.kind is EventKind.PERSISTED]
    assert [e.info.name for e in done] == ['a']
    assert done[0].info.durable
    assert done[0].uri.startswith('file://')

    o = case.session(directory=tmp_path)
    (capsule,) = (c for c in o.session.list() if c.name == 'a')
    assert (capsule.tier, capsule.note, capsule.id) == (Tier.DISK, 'before the risk', info.id)
    refused(Code.BUSY, o.session.plan_restore, 'a')
    o.session.load('a').result(10)
    o.restore('a')
    assert o.everything() == saved
    assert o.run(6) == never
    o.close()


@pytest.mark.parametrize('case', parameters())
def test_p13_all_tiers_keep_the_bytes(case: Case, tmp_path: Path) -> None:
    o = case.session(directory=tmp_path, device_slots=2, history=1)
    want = {}
    for i in range(6):
        o.run(2)
        o.session.save(f'c{i}', persist=i == 0)
        want[f'c{i}'] = o.everything()
    tiers = {c.name: c.tier for c in o.session.list()}
    assert tiers['c5'] is Tier.DEVICE
    assert tiers['c1'] is Tier.HOST
    assert tiers['c0'] is Tier.DISK, 'a durable capsule gives up its memory first'
    for name in ('c3', 'c0', 'c5', 'c1'):
        o.session.load(name).result(10)
        o.restore(name)
        assert o.everything() == want[name], name
    o.close()


def test_a_capsule_with_an_inference_in_flight_returns_with_its_latch(tmp_path: Path) -> None:
    from flashrt_ros.core.capsule import Latch
    o = CASES[0].session(directory=tmp_path)
    o.run(3)
    latch = Latch({'obs': o.session.inputs['obs'].tobytes()}, step=3, stamp_ns=99)
    o.session.submit(latch)
    o.session.commit_step(pending=latch)
    o.session.save('a', persist=True)
    o.close()
    o = CASES[0].session(directory=tmp_path)
    o.session.load('a').result(10)
    o.restore('a')
    assert o.session.pending_after_restore == latch
    o.close()


def test_without_a_folder_persist_is_unsupported() -> None:
    o = CASES[0].session()
    refused(Code.UNSUPPORTED, o.session.save, 'a', persist=True)
    assert [c.name for c in o.session.list()] == ['origin'], 'nothing was saved either'
    o.close()


def test_another_policy_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path, meaning={'joints': 'left'})
    o.session.save('a', persist=True)
    o.close()
    o = CASES[0].session(directory=tmp_path, meaning={'joints': 'right'})
    error = refused(Code.FINGERPRINT_MISMATCH, o.session.load, 'a')
    assert 'joints (capsule left, here right)' in error.message
    error = refused(Code.FINGERPRINT_MISMATCH, o.session.load, 'a')
    o.close()


def test_p8_another_build_needs_accept_inexact_and_says_so_ever_after(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path, exactness={'driver': '1'})
    o.session.save('a', persist=True)
    o.close()
    o = CASES[0].session(directory=tmp_path, exactness={'driver': '2'})
    o.session.load('a').result(10)
    error = refused(Code.FINGERPRINT_MISMATCH, o.session.plan_restore, 'a')
    assert 'driver' in error.message
    plan = o.session.plan_restore('a', accept_inexact=True)
    assert not plan.info.exact
    assert not o.session.apply(plan).result().exact
    o.step()
    assert not o.session.save('b').exact, 'what descends from an inexact restore is inexact'
    o.close()


def test_bad_files_are_named_and_the_good_ones_kept(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path)
    for name in ('good', 'bad', 'moved'):
        o.session.save(name, persist=True)
    o.close()
    bad = tmp_path / 'bad.capsule'
    bad.write_bytes(bad.read_bytes()[:100])
    (tmp_path / 'moved.capsule').rename(tmp_path / 'other.capsule')
    (tmp_path / 'link.capsule').symlink_to(tmp_path / 'good.capsule')
    os.mkfifo(tmp_path / 'pipe.capsule')
    (tmp_path / '.hidden.capsule').write_bytes(b'')
    events: list[Event] = []
    o = CASES[0].session(directory=tmp_path, on_event=events.append)
    assert [c.name for c in o.session.list()] == ['origin', 'good']
    told = ' | '.join(e.message for e in events)
    for name in ('bad', 'other', 'link', 'pipe'):
        assert f'{name}.capsule' in told
    o.close()


def test_a_file_damaged_after_the_scan_is_refused_on_load(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path)
    o.session.save('a', persist=True)
    o.close()
    o = CASES[0].session(directory=tmp_path)
    path = tmp_path / 'a.capsule'
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = o.everything()
    with pytest.raises(Refusal, match='damaged') as error:
        o.session.load('a').result(10)
    assert error.value.code is Code.CORRUPT
    assert o.everything() == before
    o.close()


def test_drop_removes_the_file_and_overwrite_replaces_it(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path)
    o.session.save('a', persist=True)
    o.run(2)
    o.session.save('a', persist=True, overwrite=True)
    saved = o.everything()
    o.session.save('b', persist=True)
    o.session.drop('b')
    o.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ['.lock', 'a.capsule']
    o = CASES[0].session(directory=tmp_path)
    o.session.load('a').result(10)
    o.restore('a')
    assert o.everything() == saved
    o.close()


def test_disk_budget_refuses_and_loses_nothing(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path, disk_bytes=1)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'a', persist=True)
    o.close()
    assert [p.name for p in tmp_path.iterdir()] == ['.lock']


def test_two_sessions_do_not_share_a_folder(tmp_path: Path) -> None:
    o = CASES[0].session(directory=tmp_path)
    refused(Code.BUSY, CASES[0].session, directory=tmp_path)
    o.close()
    CASES[0].session(directory=tmp_path).close()


def test_p19_names_never_reach_the_file_system(tmp_path: Path) -> None:
    folder = CapsuleFolder(tmp_path)
    for name in ('..', '../x', 'a/b', '', '.x', 'a' * 129, 'a\0b', 'ä', '-x'):
        refused(Code.INVALID_NAME, folder.write, name, b'')
        refused(Code.INVALID_NAME, folder.remove, name)
    assert [p.name for p in tmp_path.iterdir()] == ['.lock']


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / 'big.capsule'
    with path.open('wb') as f:
        f.truncate(1 << 40)
    refused(Code.CORRUPT, read, path, 1 << 20)


KILLED = textwrap.dedent('''
    import sys
    from pathlib import Path
    from flashrt_ros.core.disk import CapsuleFolder
    folder = CapsuleFolder(Path(sys.argv[1]))
    print('ready', flush=True)
    for i in range(10**6):
        folder.write('a', bytes([i % 251]) * 200_000)
''')


@pytest.mark.parametrize('after', [0.0, 0.003, 0.011, 0.05])
def test_p14_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path, after: float) -> None:
    child = subprocess.Popen([sys.executable, '-c', KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        child.wait(after)
    except subprocess.TimeoutExpired:
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    left: Any = tmp_path / 'a.capsule'
    if left.exists():
        data = left.read_bytes()
        assert len(data) == 200_000
        assert len(set(data)) == 1
    CapsuleFolder(tmp_path).close()
    assert not [p for p in tmp_path.iterdir() if 'part' in p.name]
