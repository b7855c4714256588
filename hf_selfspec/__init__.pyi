# The public names: what type checkers see, and from where ``__init__.py`` takes a name when it is first used.

from .auditing.audits import Audit as Audit
