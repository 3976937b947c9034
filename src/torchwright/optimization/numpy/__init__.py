"""Turn a NumPy function into a compiled one that keeps NumPy's semantics, and keep it only if it pays.

``torch.compile`` can trace NumPy, but does not promise that the traced function returns NumPy's result or is
faster. ``compile_numpy`` adds both. The journey of a call:

1. call.py describes the arguments by a key: their structure, dtypes, ranks and size class.
2. A new key goes through the *check* (check.py): the original (original.py) and compiled candidates (program.py)
   run on the real arguments. Their results are compared (compare.py), and all of them are timed in turn.
3. A graph is compiled only if NumPy's operations in it (operations.py) are known to be torch's for every kind of value:
   semantics.py looks them up in a table, or asks probe.py, which runs them on the values of domain.py.
4. The winner serves every later call with that key (wrapper.py). If none agrees and is faster, the original serves.
5. A served call may run only graphs that went through the check. A guard miss (a new shape, a new Python
   value) sends the call back to the check; too many of those and the original serves for good.

Graphs that write into an argument are refused, so a failed compiled call can always be repeated by the
original: that is how errors raised by ``fn`` keep NumPy's type and message.
"""

from torchwright.optimization.numpy.report import NumpyReport
from torchwright.optimization.numpy.wrapper import CompiledNumpy, compile_numpy

__all__ = ["CompiledNumpy", "NumpyReport", "compile_numpy"]
