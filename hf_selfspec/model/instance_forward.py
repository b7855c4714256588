"""What stands on a module while something of ours runs, and that copies and pickles of the module leave out."""

import copyreg
import operator
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn as nn

Forward = Callable[..., Any]
ABSENT: Any = object()


class InstanceForward(partial[Any]):
    """What a module calls in place of ``before``, its instance forward, or of its class's where that is absent; or in
    place of another function of the module, by its ``name``.

    A subclass of ``partial``, since that takes as long as a function, and an object with ``__call__`` longer.
    """

    before: Any
    of_others: Any  # the first below that is not ours
    place: tuple[nn.Module, str]
    original: Forward
    run: Forward
    is_over: bool

    @classmethod
    def of(cls, module: nn.Module, run: Forward, name: str) -> "InstanceForward":
        """Makes ``run`` the forward of a module."""
        forward, before = cls(run), module.__dict__.get(name, ABSENT)
        others = before.of_others if isinstance(before, InstanceForward) else before
        vars(forward).update(before=before, of_others=others, place=(module, name), run=run, is_over=False)
        forward.original = getattr(module, name)
        return forward

    def end(self) -> Any:
        """Leaves calls, of whoever still has it, to the original forward; returns the first below that is not over."""
        # ``run`` stays in its attributes: another thread may be in it.
        self.__setstate__((self.original, (), {}, vars(self) | {"is_over": True}))  # type: ignore[attr-defined]  # of functools.partial
        before = self.before
        while isinstance(before, InstanceForward) and before.is_over:
            before = before.before
        return before

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For classes that copy their attributes themselves: their copies have the forward of others, if any."""
        if self.of_others is ABSENT:
            return getattr, self.place
        return operator.getitem, ((self.of_others,), 0)


class HookOfOurs(partial[Any]):
    """A hook of ours, which does nothing in copies by classes that copy their attributes themselves."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HookOfOurs, (_do_nothing,)


def _do_nothing(*args: Any) -> None: ...


# For each class of modules who has something on one.
_users: dict[type, set[int]] = {}


def leave_out_of_copies(module_class: type, user: int) -> None:
    """Makes copies and pickles of modules of a class leave out what is ours, until the last user has ended that."""
    if module_class in _users or module_class not in copyreg.dispatch_table:
        _users.setdefault(module_class, set()).add(user)
        copyreg.dispatch_table[module_class] = _reduced  # type: ignore[assignment]  # of a class by its name


def end_leaving_out(module_class: type, user: int) -> None:
    """Ends that of one user."""
    users = _users.get(module_class, set())
    users.discard(user)
    if not users and _users.pop(module_class, None) is not None:
        copyreg.dispatch_table.pop(module_class, None)


def _reduced(module: nn.Module) -> Any:
    """What copies and pickles a module: without forwards and hooks of ours, which are those of the original."""
    reduced: Any = module.__reduce_ex__(4)
    function, arguments, state, *items = reduced
    if isinstance(state, dict):
        hooks = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
        ours, kept = {key for key, hook in hooks if isinstance(hook, HookOfOurs)}, dict[str, Any]()
        for name, value in state.items():
            kept[name] = value.of_others if isinstance(value, InstanceForward) else value
            if ours and name.startswith("_forward_"):  # hooks, and which of them get keywords
                kept[name] = OrderedDict((key, hook) for key, hook in value.items() if key not in ours)
        state = {name: value for name, value in kept.items() if value is not ABSENT}
    return function, arguments, state, *items
