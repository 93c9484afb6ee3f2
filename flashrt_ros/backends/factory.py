"""Python factories `module:function`: which modules may supply code, and what they returned."""
from __future__ import annotations

from collections.abc import Callable
import importlib
from typing import Any

from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal

_OWN = 'flashrt_ros'


def find_factory(spec: PolicySpec) -> Callable[..., Any]:
    """Return the function that `spec.factory` names, from an allowed module only."""
    text = spec.factory or ''
    module_name, _, function_name = text.partition(':')
    if not all(p.isidentifier() for p in (*module_name.split('.'), function_name)):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.factory: {text!r} is not of the form '
                      'module:function')
    allowed = (_OWN, *spec.modules)
    if not any(module_name == m or module_name.startswith(m + '.') for m in allowed):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.factory: module {module_name!r} may not '
                      'supply code; list it in the parameter python_modules '
                      f'(now: {", ".join(spec.modules) or "none"})')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.factory: module {e.name!r} is not '
                      'installed or not on PYTHONPATH') from e
    except Exception as e:
        raise Refusal(Code.BACKEND, f'policy.factory: importing {module_name} raised '
                      f'{type(e).__name__}: {e}') from e
    function = getattr(module, function_name, None)
    if not callable(function):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.factory: {module_name} has no function '
                      f'{function_name!r}')
    return function  # type: ignore[no-any-return]


def call_factory(function: Callable[..., Any], spec: PolicySpec, **extra: Any) -> Any:
    """Call it with the options as keyword arguments; what it raises becomes a refusal."""
    try:
        return function(**spec.options, **extra)
    except Refusal:
        raise
    except Exception as e:
        raise Refusal(Code.BACKEND, f'policy.factory: {spec.factory} raised {type(e).__name__}: '
                      f'{e} (called with options {sorted(spec.options)})') from e
