"""What the backend and its double may call is what NVIDIA's bindings have."""
from __future__ import annotations

import ast
import inspect
import logging
from pathlib import Path
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashrt_ros.backends import tensorrt_api as api
from flashrt_ros.core.errors import Code, Refusal
from test.backends import tensorrt_double as double
from test.backends.cudart_double import Cudart, Error
from test.backends.tensorrt_wheels import LIBRARIES, real

SOURCES = sorted(Path(api.__file__).parent.glob('tensorrt_*.py'))
DOUBLES = {'Runtime': [double.Runtime], 'Engine': [double.Engine, double.RtxEngine],
           'Context': [double.Context, double.RtxContext], 'RuntimeConfig': [double.RuntimeConfig]}


def members(kind: type) -> set[str]:
    """Return the public names of a protocol or class, those of annotations included."""
    names = {n for k in kind.__mro__ if k.__module__ != 'typing' and k is not object
             for n in [*vars(k), *inspect.get_annotations(k)]}
    return {n for n in names if not n.startswith('_')}


def real_parameters(function: Any) -> list[list[str]]:
    """Return the parameter names of each overload, from what pybind11 writes into docstrings."""
    signatures = re.findall(r'(?m)^(?:\d+\. )?\w+\((self: .*)\) -> ', function.__doc__ or '')
    assert signatures, f'no signature in the docstring: {function.__doc__!r}'
    return [re.findall(r'(?:^|, )(\w+): ', s)[1:] for s in signatures]


@pytest.mark.parametrize('name', LIBRARIES)
@pytest.mark.parametrize('protocol', api.BINDINGS)
def test_every_method_that_is_called_exists_with_these_parameters(name: str, protocol: str
                                                                  ) -> None:
    library = real(name)
    mine, theirs = getattr(api, protocol), getattr(library.module, api.BINDINGS[protocol])
    may_lack = set() if library.is_rtx else set(api.OPTIONAL.get(protocol, ()))
    for member in members(mine):
        if not hasattr(theirs, member):
            assert member in may_lack, f'{theirs.__name__} has no {member}'
            continue
        function = vars(mine).get(member)
        if inspect.isfunction(function):
            wanted = list(inspect.signature(function).parameters)[1:]
            assert wanted in real_parameters(getattr(theirs, member)), member
        else:
            assert isinstance(inspect.getattr_static(theirs, member), property), (
                f'{member} is no property')


@pytest.mark.parametrize('protocol', DOUBLES)
def test_the_double_invents_nothing(protocol: str) -> None:
    mine = getattr(api, protocol)
    for kind in DOUBLES[protocol]:
        invented = members(kind) - members(mine)
        assert not invented, f'{kind.__name__} has {invented}, {protocol} does not'
        for member in members(kind):
            function = vars(mine).get(member)
            if inspect.isfunction(function):
                assert (list(inspect.signature(getattr(kind, member)).parameters)
                        == list(inspect.signature(function).parameters)), member


@pytest.mark.parametrize('name', LIBRARIES)
def test_the_double_s_module_is_part_of_the_real_one(name: str) -> None:
    module = real(name).module
    trt = double.Trt(Cudart(), name)
    knobs = {'rt', 'capturable', 'broken_capture', 'memory_fails', 'contexts', 'engine'}
    for attribute in set(vars(trt)) - knobs:
        assert hasattr(module, attribute), attribute
        ours = getattr(getattr(trt, attribute), '__members__', {})
        theirs = getattr(getattr(module, attribute), '__members__', {})
        assert set(ours) <= set(theirs), attribute
    for level in double.ILogger.Severity:
        assert hasattr(module.ILogger.Severity, level.name)


@pytest.mark.parametrize('name', LIBRARIES)
def test_every_constant_that_is_used_exists(name: str) -> None:
    library = real(name)
    rtx_only = {'CudaGraphStrategy', 'DynamicShapesKernelSpecializationStrategy',
                'EngineValidity', 'EngineInvalidityDiagnostics'}
    used = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            chain = []
            while isinstance(node, ast.Attribute):
                chain.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in ('trt', 'severity') and chain:
                used.add(('ILogger', 'Severity', *chain) if node.id == 'severity'
                         else tuple(chain))
    assert ('ExecutionContextAllocationStrategy', 'USER_MANAGED') in used
    for chain in used:
        if chain[0] in rtx_only and not library.is_rtx:
            continue
        if chain[-1] == 'REQUIRE_USER_ALLOCATION' and not library.is_rtx:
            continue  # asked for with hasattr
        thing = library.module
        for attribute in chain:
            assert hasattr(thing, attribute), '.'.join(chain)
            thing = getattr(thing, attribute)


@pytest.mark.parametrize('name', LIBRARIES)
def test_every_data_type_is_known_by_its_size(name: str) -> None:
    from flashrt_ros.core.layout import DTYPES
    module = real(name).module
    for member in module.DataType.__members__.values():
        if member.name in api.DTYPES:
            assert DTYPES[api.dtype_of(member)][0] == member.itemsize
        else:
            assert api.dtype_of(member) == member.name
            assert member.name in ('INT4', 'FP4', 'E8M0')


def test_a_machine_without_tensorrt_is_told_what_to_install(monkeypatch: Any) -> None:
    def nothing(name: str) -> Any:
        raise ModuleNotFoundError(f'No module named {name!r}')
    monkeypatch.setattr(api.importlib, 'import_module', nothing)
    with pytest.raises(Refusal, match=r'pip install .flashrt_ros\[tensorrt-rtx\]') as refused:
        api.find()
    assert refused.value.code is Code.UNSUPPORTED
    assert "No module named 'tensorrt'" in refused.value.message


def test_the_full_library_comes_first_and_an_old_one_or_a_stub_is_passed_over(monkeypatch: Any
                                                                              ) -> None:
    def module(version: str) -> Any:
        m = ModuleType('m')
        m.__dict__.update(__version__=version, Runtime=object, ILogger=double.ILogger)
        return m
    there = {'tensorrt': module('10.13.3.9'), 'tensorrt_rtx_bindings': module('1.7.1.116')}

    def of(name: str) -> Any:
        if name in there:
            return there[name]
        raise ModuleNotFoundError(name)
    monkeypatch.setattr(api.importlib, 'import_module', of)
    assert api.find().title == 'TensorRT 10.13.3.9'
    assert api.find('tensorrt_rtx').title == 'TensorRT-RTX 1.7.1.116'
    there['tensorrt'] = module('8.6.1')
    assert api.find().name == 'tensorrt_rtx'
    there['tensorrt'] = SimpleNamespace(__version__='0.1')
    assert api.find().name == 'tensorrt_rtx'
    del there['tensorrt_rtx_bindings']
    with pytest.raises(Refusal, match='a package without the library'):
        api.find()


def test_what_tensorrt_says_goes_to_who_listens_and_else_to_the_log(caplog: Any) -> None:
    library = double.Trt(Cudart()).library()
    level = double.ILogger.Severity
    with api.listening(library) as outer, api.listening(library) as inner:
        library.logger.log(level.ERROR, 'Error Code 1: Cuda Runtime (cudaError 35: old driver)')
        library.logger.log(level.WARNING, 'careful')
        library.logger.log(level.INTERNAL_ERROR, 'Thread context has not been set! Using …')
    assert outer.errors == inner.errors
    assert inner.warnings == ['careful']
    assert inner.refusal('it').code is Code.UNSUPPORTED
    assert 'NVIDIA driver' in inner.refusal('it').message
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    library.logger.log(level.ERROR, 'nobody asked')
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == ['nobody asked']


def test_memory_and_driver_are_told_from_what_tensorrt_says() -> None:
    for text, code in (('Error Code 2: OutOfMemory (Requested size was 3 bytes.)', Code.NO_MEMORY),
                       ('cudaError 2: out of memory)', Code.NO_MEMORY),
                       ('(cudaError 100: no CUDA-capable device is detected)', Code.UNSUPPORTED),
                       ('Error Code 4: Internal Error', Code.BACKEND)):
        journal = api.Journal()
        journal.errors.append(text)
        assert journal.refusal('loading').code is code
        assert text in journal.refusal('loading').message


def test_the_cuda_double_invents_nothing_either() -> None:
    runtime = pytest.importorskip('cuda.bindings.runtime', reason="cuda-bindings is not installed: "
                                  "pip install 'flashrt_ros[cuda]'")
    ours = Cudart()
    for name in [n for n in vars(Cudart) if n.startswith('cuda')]:
        mine, theirs = getattr(ours, name), getattr(runtime, name)
        if isinstance(mine, int):
            assert mine == theirs, name
        elif isinstance(mine, SimpleNamespace):
            for member, value in vars(mine).items():
                assert int(getattr(theirs, member)) == value, member
        elif inspect.ismethod(mine):
            parameters = list(inspect.signature(theirs).parameters)
            assert len(inspect.signature(mine).parameters) == len(parameters), name
    for error in Error:
        assert int(getattr(runtime.cudaError_t, error.name)) == error
