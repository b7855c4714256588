"""The errors that this package raises when a user can do something about them.

``SelfSpecError``
 ├── ``SettingError``           a setting has a value that is not allowed (also a ``ValueError``)
 ├── ``SettingTypeError``       a setting has the wrong type (also a ``TypeError``)
 ├── ``UnsupportedModelError``  the model's structure does not allow it (also a ``ValueError``)
 ├── ``UnsupportedOptionError`` an option of ``generate`` cannot be used here (also a ``ValueError``)
 └── ``NumericalError``         the model returned NaN or infinite logits (also a ``RuntimeError``)
"""

# How many characters of a library's message ours repeat; some messages list hundreds of classes.
_SHOWN = 200


class SelfSpecError(Exception):
    """Base class of all errors that this package raises on purpose."""


class SettingError(SelfSpecError, ValueError):
    """A setting has a value that is not allowed."""


class SettingTypeError(SelfSpecError, TypeError):
    """A setting has the wrong type."""


class UnsupportedModelError(SelfSpecError, ValueError):
    """The model's structure does not allow the requested settings."""


class UnsupportedOptionError(SelfSpecError, ValueError):
    """An option of ``generate`` that cannot be combined with self-speculative decoding."""


class NumericalError(SelfSpecError, RuntimeError):
    """The model returned NaN or infinite logits, so no token can be chosen."""


def brief(error: Exception) -> str:
    """Returns a library's error as one short line."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
