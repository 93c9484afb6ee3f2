"""Bags as robots leave them: every storage, every compression, and every way to be broken."""
from __future__ import annotations

import os
from pathlib import Path
import random
import shutil
import sqlite3

import numpy as np
import pytest
import yaml

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.bags import Bag, open_bag
from test.shared_data import data
from test.tools.live_run import (
    ACTIONS,
    JOINT_STATE,
    START,
    TYPES,
    header,
    make,
    raw,
    stamp,
    write_bag,
)

Messages = list[tuple[str, str, int, bytes]]


def joints(ns: int, *position: float) -> bytes:
    """Return the CDR bytes of a JointState."""
    return raw(make(JOINT_STATE, header=header(ns), name=[f'j{i}' for i in range(len(position))],
                    position=np.array(position)))


def some(n: int = 20) -> Messages:
    """Return messages of two topics, 10 ms apart."""
    found: Messages = []
    for i in range(n):
        ns = START + i * 10_000_000
        found.append(('/joint_states', JOINT_STATE, ns, joints(ns, 0.1 * i, -1.0)))
        found.append(('/action', ACTIONS, ns + 1, raw(make(
            ACTIONS, layout=make('std_msgs/msg/MultiArrayLayout'),
            data=np.array([i, i + 1], np.float32)))))
    return found


def read(path: Path) -> list[tuple[str, int, bytes]]:
    """Return all messages of a bag."""
    with open_bag(path) as bag:
        return [(m.topic, m.time_ns, m.raw) for m in bag.messages(bag.topics)]


def refused(path: Path, code: Code, *words: str, **how: object) -> str:
    """Open and read a bag; expect a refusal with these words in it."""
    def attempt() -> None:
        with open_bag(path, **how) as bag:  # type: ignore[arg-type]
            for m in bag.messages(bag.topics):
                bag.decode(m)
    with pytest.raises(Refusal) as caught:
        attempt()
    message = str(caught.value.message)
    assert caught.value.code is code, message
    for word in words:
        assert word in message, message
    return message


# -- what can be read ----------------------------------------------------------------------------


@pytest.mark.parametrize(('name', 'counts', 'seconds'), [
    ('g1_walk_mcap', {'/joint_states': 500, '/imu/data': 500, '/cmd_vel': 500,
                      '/policy/action': 500}, 9.98),
    ('h1_walk_zstd_file_db3', {'/joint_states': 200, '/imu/data': 200, '/cmd_vel': 200,
                               '/policy/action': 200}, 3.98),
    ('crab_adya_gait.bag', {'/servo/position_data': 1300, '/servo/encoder_data': 52,
                            '/load_cell_data': 4285}, 12.98),
    ('plotjuggler_rosbag2_test', {'/imu': 1565, '/battery': 1565, '/pose': 1565}, 62.56),
    ('plotjuggler_fake_joint_state', {'/fake_joints_state': 2725}, 2.72),
])
def test_real_bags_are_read_whole(name: str, counts: dict[str, int], seconds: float) -> None:
    with open_bag(data('bags', name)) as bag:
        assert {t.name: t.count for t in bag.topics.values() if t.count} == counts
        assert bag.seconds == pytest.approx(seconds, abs=0.01)
        times = []
        seen = dict.fromkeys(counts, 0)
        for m in bag.messages(counts):
            if not seen[m.topic]:
                bag.decode(m)
            seen[m.topic] += 1
            times.append(m.time_ns)
        assert seen == counts
        assert times == sorted(times)


def test_messages_that_another_reader_overlooks_are_found() -> None:
    with open_bag(data('bags_bad', 'rosbag2_talker_db3')) as bag:
        assert [bag.decode(m).data for m in bag.messages(['/topic'])][:2] == [
            'Hello, world! 0', 'Hello, world! 1']
        assert bag.count == 20


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
@pytest.mark.parametrize('compression', ['', 'message', 'file', 'storage'])
def test_each_storage_and_compression_gives_the_same_bytes(tmp_path: Path, storage: str,
                                                           compression: str) -> None:
    if (storage, compression) == ('sqlite3', 'storage'):
        pytest.skip('SQLite has no compressed chunks')
    wanted = some()
    bag = write_bag(tmp_path / 'walk', wanted, storage=storage, compression=compression)
    assert read(bag) == [(t, ns, b) for t, _, ns, b in wanted]


@pytest.mark.parametrize('compression', ['', 'message', 'file'])
def test_a_bag_without_metadata_and_one_file_of_it_are_read(tmp_path: Path, compression: str
                                                            ) -> None:
    wanted = [(t, ns, b) for t, _, ns, b in some()]
    bag = write_bag(tmp_path / 'walk', some(), compression=compression)
    (bag / 'metadata.yaml').unlink()
    assert read(bag) == wanted
    (file,) = bag.iterdir()
    assert read(file) == wanted
    with open_bag(bag) as opened:
        assert 'no metadata.yaml' in opened.remarks[0]


def test_split_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    wanted = some(11)
    folder = tmp_path / 'split'
    folder.mkdir()
    for i in range(11):
        part = write_bag(tmp_path / f'part{i}', wanted[2 * i:2 * i + 2])
        shutil.copy(next(part.glob('*.mcap')), folder / f'split_{i}.mcap')
    assert read(folder) == [(t, ns, b) for t, _, ns, b in wanted]
    assert len(read(data('bags_bad', 'rosbag2_no_metadata_split'))) == 1324 + 1324 + 529


def test_a_folder_named_bag_is_a_folder(tmp_path: Path) -> None:
    assert len(read(write_bag(tmp_path / 'gait.bag', some()))) == 40


def test_an_unindexed_file_that_is_out_of_order_is_sorted(tmp_path: Path) -> None:
    wanted = some(6)
    (file,) = write_bag(tmp_path / 'walk', wanted[::-1]).glob('*.mcap')
    content = bytearray(file.read_bytes())
    content[-28:-20] = bytes(8)              # the footer knows of no summary
    file.write_bytes(bytes(content))
    assert read(file) == [(t, ns, b) for t, _, ns, b in wanted]


def test_a_digest_is_that_of_the_bytes_a_node_receives(tmp_path: Path) -> None:
    conversions = pytest.importorskip('flashrt_ros.node.conversions', reason='needs rclpy')
    from rclpy.serialization import serialize_message
    from sensor_msgs.msg import JointState
    message = JointState(name=['j0', 'j1'], position=[0.1, -1.0])
    message.header.stamp.sec = START // 10**9
    sent = serialize_message(message)
    assert sent[:4] == b'\x00\x01\x00\x00'   # the encapsulation header belongs to it
    bag = write_bag(tmp_path / 'one', [('/joint_states', JOINT_STATE, START, sent)])
    with open_bag(bag) as opened:
        (found,) = opened.messages(opened.topics)
        assert found.digest == conversions.digest(sent)
        assert opened.decode(found).position.tolist() == [0.1, -1.0]


# -- types ---------------------------------------------------------------------------------------


def foreign_types(tmp_path: Path, *, old: bool = True) -> Path:
    """A SQLite bag of a custom type that carries no definitions, as older recorders write."""
    bag = write_bag(tmp_path / 'custom', [('/x', JOINT_STATE, START, joints(START, 1.0))],
                    storage='sqlite3', version=8)
    (file,) = bag.glob('*.db3')
    with sqlite3.connect(file) as db:
        db.execute('UPDATE topics SET type = "crab_interfaces/msg/Gait"')
        db.execute('DROP TABLE message_definitions')
        db.execute('UPDATE schema SET schema_version = 3')
    db.close()
    meta = bag / 'metadata.yaml'
    meta.write_text(meta.read_text().replace(JOINT_STATE, 'crab_interfaces/msg/Gait'))
    return bag


def test_a_missing_type_is_named_and_msg_path_brings_it(tmp_path: Path) -> None:
    bag = foreign_types(tmp_path)
    meta = bag / 'metadata.yaml'
    plain = yaml.safe_load(meta.read_text())
    for topic in plain['rosbag2_bagfile_information']['topics_with_message_count']:
        topic['topic_metadata']['type_description_hash'] = ''
    meta.write_text(yaml.safe_dump(plain))
    refused(bag, Code.UNSUPPORTED, 'crab_interfaces/msg/Gait', '--msg-path', 'Gait.msg')
    text = 'std_msgs/Header header\nstring[] name\nfloat64[] position\nfloat64[] velocity\n' \
           'float64[] effort\n'
    for place in ('Gait.msg', 'crab_interfaces/msg/Gait.msg', 'msg/Gait.msg'):
        path = tmp_path / place.replace('/', '_') / place
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with open_bag(bag, msg_paths=[tmp_path / place.replace('/', '_')]) as opened:
            (message,) = opened.messages(['/x'])
            assert opened.decode(message).position.tolist() == [1.0]


def test_another_version_of_a_type_is_refused_by_its_hash(tmp_path: Path) -> None:
    bag = foreign_types(tmp_path)
    (tmp_path / 'Gait.msg').write_text('int32 other\n')
    refused(bag, Code.UNSUPPORTED, 'another version', msg_paths=[tmp_path])


def test_a_definition_that_contains_a_missing_one_names_both(tmp_path: Path) -> None:
    bag = foreign_types(tmp_path)
    (tmp_path / 'Gait.msg').write_text('legs_msgs/Leg[] legs\n')
    refused(bag, Code.UNSUPPORTED, 'legs_msgs/msg/Leg', 'crab_interfaces/msg/Gait contains',
            msg_paths=[tmp_path])


def test_bytes_that_do_not_fit_their_type_are_refused(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / 'x', [('/x', JOINT_STATE, START, b'\x00\x01\x00\x00\x01')])
    refused(bag, Code.CORRUPT, '/x at 0.000 s', 'do not fit', JOINT_STATE)


def test_our_own_messages_need_no_definition(tmp_path: Path) -> None:
    TYPES.need('flashrt_ros/srv/RestoreCapsule_Event')
    TYPES.need('std_srvs/srv/Trigger_Event')
    assert 'flashrt_ros/srv/RestoreCapsule_Request' in TYPES.store.fielddefs


# -- what cannot ---------------------------------------------------------------------------------


@pytest.mark.parametrize(('name', 'code', 'words'), [
    ('g1_walk_truncated.mcap', Code.CORRUPT, ('cut off', 'mcap recover')),
    ('lfs_pointer.mcap', Code.CORRUPT, ('Git LFS pointer', 'git lfs pull')),
    ('rosbag2_wrong_serialization_mcap', Code.UNSUPPORTED, ('wrong_format', 'not as CDR')),
])
def test_bad_bags_say_what_they_are(name: str, code: Code, words: tuple[str, ...]) -> None:
    refused(data('bags_bad', name), code, *words)


def test_an_empty_bag_can_be_opened_and_holds_nothing() -> None:
    with open_bag(data('bags_bad', 'rosbag2_empty_bag')) as bag:
        assert (bag.count, bag.seconds, list(bag.messages(bag.topics))) == (0, 0.0, [])


def test_a_path_that_is_none_suggests_the_nearest(tmp_path: Path) -> None:
    write_bag(tmp_path / 'walk_1', some(1))
    refused(tmp_path / 'walk_l', Code.NOT_FOUND, 'did you mean', 'walk_1')
    refused(tmp_path, Code.NOT_FOUND, 'no bag', 'walk_1')
    refused(tmp_path / 'walk_1' / 'metadata.yaml', Code.INVALID_ARGUMENT, 'give its folder')


@pytest.mark.parametrize(('content', 'code', 'word'), [
    (b'', Code.CORRUPT, 'no bytes'), (bytes(4096), Code.CORRUPT, 'zeros'),
    (b'#ROSBAG V2.0\n', Code.UNSUPPORTED, 'rosbags-convert'),
    (b'hello', Code.CORRUPT, 'neither MCAP nor SQLite'),
    (b'SQLite format 3\x00' + bytes(100), Code.CORRUPT, 'damaged'),
    (b'\x28\xb5\x2f\xfd\x00\x00', Code.CORRUPT, 'unpacked')])
def test_a_file_that_is_no_bag_says_what_it_is(tmp_path: Path, content: bytes, code: Code,
                                               word: str) -> None:
    path = tmp_path / 'x.mcap'
    path.write_bytes(content)
    refused(path, code, word)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / 'walk', some())
    next(bag.glob('*.mcap')).unlink()
    refused(bag, Code.NOT_FOUND, 'walk.mcap', 'copy the whole folder')


@pytest.mark.parametrize('text', ['', 'a: [', '[]', 'rosbag2_bagfile_information: {}', '\x00'])
def test_broken_metadata_leaves_the_files_readable(tmp_path: Path, text: str) -> None:
    bag = write_bag(tmp_path / 'walk', some())
    (bag / 'metadata.yaml').write_text(text)
    with open_bag(bag) as opened:
        assert opened.count == 40
        assert 'metadata.yaml' in opened.remarks[0]


def test_fewer_messages_than_metadata_counts_are_remarked(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / 'walk', some())
    meta = bag / 'metadata.yaml'
    meta.write_text(meta.read_text().replace('message_count: 40', 'message_count: 44'))
    with open_bag(bag) as opened:
        assert opened.remarks == ['metadata.yaml counts 44 messages, the files hold 40']


def test_messages_in_a_write_ahead_log_are_not_overlooked(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / 'walk', some(), storage='sqlite3')
    (file,) = bag.glob('*.db3')
    file.with_name(file.name + '-wal').write_bytes(b'x' * 100)
    refused(bag, Code.CORRUPT, 'wal_checkpoint')


def test_a_pipe_does_not_stop_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / 'walk.mcap')
    refused(tmp_path / 'walk.mcap', Code.IO, 'no regular file')


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
def test_no_damage_to_a_file_ends_in_a_traceback(tmp_path: Path, storage: str) -> None:
    """Cut off anywhere, any byte changed: a refusal, or messages; never another exception."""
    (good,) = [p for p in write_bag(tmp_path / 'walk', some(3), storage=storage,
                                    compression='storage' if storage == 'mcap' else '').iterdir()
               if p.suffix != '.yaml']
    content, bad = good.read_bytes(), tmp_path / f'bad{good.suffix}'
    rng = random.Random(3)
    outcomes = {'refused': 0, 'read': 0}
    for i in range(150):
        if i % 2:
            hurt = content[:rng.randrange(len(content))]
        else:
            hurt = bytearray(content)
            for _ in range(rng.randrange(1, 4)):
                hurt[rng.randrange(len(hurt))] = rng.randrange(256)
        bad.write_bytes(bytes(hurt))
        try:
            with open_bag(bad) as bag:
                for m in bag.messages(bag.topics):
                    bag.decode(m)
            outcomes['read'] += 1
        except Refusal as refusal:
            assert refusal.message
            outcomes['refused'] += 1
    assert outcomes['refused'] > 50, outcomes


def test_a_topic_of_a_foreign_serialisation_hurts_only_who_reads_it(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / 'walk', some(), storage='sqlite3')
    (file,) = bag.glob('*.db3')
    with sqlite3.connect(file) as db:
        db.execute('UPDATE topics SET serialization_format = "protobuf" WHERE name = "/action"')
    db.close()

    def topics(opened: Bag, name: str) -> int:
        return sum(1 for _ in opened.messages([name]))
    with open_bag(bag) as opened:
        assert topics(opened, '/joint_states') == 20
        with pytest.raises(Refusal, match='protobuf'):
            topics(opened, '/action')


def test_stamps_of_a_helper_are_ros_stamps() -> None:
    assert (stamp(3_000_000_007).sec, stamp(3_000_000_007).nanosec) == (3, 7)
