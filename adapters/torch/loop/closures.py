"""Finds out, from the source of ``step()``, whether ``optimizer.step(closure)`` calls its closure before it writes.

If it does, the update begins when the closure has returned; else the whole step counts as the update. See decision 28.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

WHOLE_STEP = (
    "{0}.step(closure) may write before its closure has run, or runs it more than once, as far as its code shows. So "
    "the whole step counts as the update, with its forward and backward passes. What the step changes is copied before "
    "it: if a rank is lost in the step, the version before it is saved. To avoid the copy, call the closure yourself "
    "where the optimizer allows it: loss = closure(); optimizer.step()"
)

NOT_EVALUATED = (
    "{0}.step(closure) has not called its closure, so ttp noticed this update only when it was over: give no closure "
    "to an optimizer that does not call it"
)

Closure = Callable[..., Any]

_GRADIENTS_ON = frozenset({"enable_grad", "set_grad_enabled"})
_HARMLESS = _GRADIENTS_ON | {
    "_cuda_graph_capture_health_check",
    "_accelerator_graph_capture_health_check",
    "super",
}


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of ``Optimizer.step``, of which the first is the optimizer itself."""
    found = args[1] if len(args) > 1 else kwargs.get("closure")
    return found if callable(found) else None


def with_closure(
    closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``Optimizer.step`` with ``closure`` in place of the closure in them."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, kwargs | {"closure": closure}


@functools.lru_cache(maxsize=64)
def evaluates_first(kind: Any) -> bool:
    """Return whether ``step()`` of this optimizer class is known to call its closure once, before anything else."""
    if issubclass(kind, torch.optim.LBFGS):
        return False
    return _evaluates_first(kind.__mro__)


def _evaluates_first(classes: Sequence[type]) -> bool:
    place = next((number for number, kind in enumerate(classes) if "step" in vars(kind)), None)
    step = inspect.unwrap(vars(classes[place])["step"]) if place is not None else None
    if place is None or step is None or step.__module__.startswith("torch.optim."):
        return place is not None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step))).body[0]
    except (OSError, TypeError, SyntaxError):
        return False
    if not isinstance(tree, ast.FunctionDef) or len(tree.args.args) < 2:
        return False
    reader = _Reader(tree.args.args[1].arg)
    uses = reader.uses(tree)
    if reader.before(tree.body) is not True or len(uses) != 1:
        return False
    if reader.passes_on(uses[0]):
        return _evaluates_first(classes[place + 1 :])
    return isinstance(uses[0].func, ast.Name)


class _Reader:
    """Reads the syntax tree of a ``step()`` to find where its closure is called.

    Args:
        name: name of the parameter that is the closure.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def uses(self, tree: ast.AST) -> list[ast.Call]:
        """Return the calls in which the closure is called or passed on."""
        return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and self._is_use(node)]

    def before(self, statements: Sequence[ast.stmt]) -> bool | None:
        """Return True if the statements call the closure first, False if perhaps something else, None if nothing."""
        for statement in statements:
            found = self._statement(statement)
            if found is not None:
                return found
        return None

    def passes_on(self, call: ast.Call) -> bool:
        """Return whether the call is ``super().step(closure)``."""
        match call.func:
            case ast.Attribute(attr="step", value=ast.Call(func=ast.Name(id="super"))):
                return True
        return False

    def _statement(self, statement: ast.stmt) -> bool | None:
        match statement:
            case ast.If(test=test, body=body, orelse=other) if self._tests_closure(test):
                found = self.before(body), self.before(other)
                return False if False in found else True if True in found else None
            case ast.With(items=items, body=body) if all(_name(item.context_expr) in _GRADIENTS_ON for item in items):
                return self.before(body)
            case ast.Assign(targets=[ast.Name()], value=value) | ast.Expr(value=value) | ast.Return(value=value):
                return self._value(value)
            case ast.AnnAssign(target=ast.Name(), value=value):
                return self._value(value)
            case ast.Assert() | ast.Raise() | ast.Pass():
                return None
        return False

    def _value(self, value: ast.expr | None) -> bool | None:
        """Return True if an expression calls only the closure, False if something else, None if it calls nothing."""
        calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)] if value is not None else []
        uses = [call for call in calls if self._is_use(call)]
        others = [call for call in calls if call not in uses and _name(call) not in _HARMLESS]
        if any(not self._is_wrapped(call) for call in others):
            return False
        return True if uses else None

    def _is_use(self, call: ast.Call) -> bool:
        """Return whether the closure is called, or is an argument of the call."""
        if self._is_wrapped(call):
            return False
        values = [call.func, *call.args, *(keyword.value for keyword in call.keywords)]
        return any(isinstance(value, ast.Name) and value.id == self._name for value in values)

    @staticmethod
    def _is_wrapped(call: ast.Call) -> bool:
        """Return whether the call is ``torch.enable_grad()(closure)``."""
        return isinstance(call.func, ast.Call) and _name(call.func) in _GRADIENTS_ON

    def _tests_closure(self, test: ast.expr) -> bool:
        """Return whether the condition tests only whether there is a closure."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)) | ast.Name(id=name):
                return name == self._name
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
            ):
                return name == self._name
        return False


def _name(called: ast.expr) -> str:
    """Return the last name in a call or a name: ``enable_grad`` for ``torch.enable_grad()``."""
    function = called.func if isinstance(called, ast.Call) else called
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
