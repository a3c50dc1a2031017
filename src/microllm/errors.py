"""The exception tree. A user's mistake is a ``ValueError`` as well; our own bugs are ``assert``.

    MicroLLMError
    ├── ConfigError            (ValueError)   a configuration or option value that cannot work
    │   └── UnsupportedModelError             a model feature that this project refuses, by name
    ├── CheckpointError        (ValueError)   a weight file that is damaged, hostile or of another shape
    │   └── LoadError                         tensors missing, unexpected or incompatible; carries the report
    ├── ModelNotFoundError     (ValueError)   no model of that name or path
    ├── TextError              (ValueError)   a tokenizer or chat template that cannot be used
    ├── RequestError           (ValueError)   a prompt or sampling parameter that cannot be served
    ├── OperatorError          (ValueError)   an operator was given what its contract refuses
    ├── EvidenceError          (ValueError)   a comparison, timing or receipt that would not be honest
    ├── StructureError         (ValueError)   a structure, binding, scheme or host that does not fit
    │   ├── GateRefused                       a region that does not reach its floor
    │   ├── GuardRefused                      a call or change that an attached host does not take
    │   └── CaptureRefused                    a computation that cannot be captured as it is
    ├── DataError              (ValueError)   training data that cannot be packed or read
    ├── TrainingError          (RuntimeError) a run that must not go on: a number that is not finite, a rank that failed
    └── UnavailableError       (RuntimeError) something this machine does not have
        └── MissingExtraError                 an optional dependency, named with its extra

Every text says what it got, what it needs, and what to do.
"""

from __future__ import annotations


class MicroLLMError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(MicroLLMError, ValueError):
    """A configuration or option value that cannot work."""


class UnsupportedModelError(ConfigError):
    """A model feature that this project refuses, by name."""


class CheckpointError(MicroLLMError, ValueError):
    """A weight file that is damaged, hostile or of another shape."""


class LoadError(CheckpointError):
    """Tensors are missing, unexpected or incompatible; ``report`` names all of them."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class ModelNotFoundError(MicroLLMError, ValueError):
    """No model of that name or path."""


class TextError(MicroLLMError, ValueError):
    """A tokenizer or chat template that cannot be used."""


class RequestError(MicroLLMError, ValueError):
    """A prompt or sampling parameter that cannot be served."""


class OperatorError(MicroLLMError, ValueError):
    """An operator was given what its contract refuses."""


class EvidenceError(MicroLLMError, ValueError):
    """A comparison, timing or receipt that would not be honest."""


class StructureError(MicroLLMError, ValueError):
    """A structure, binding, scheme or host that does not fit."""


class GateRefused(StructureError):
    """A region that does not reach its floor."""


class GuardRefused(StructureError):
    """A call or change that an attached host does not take."""


class CaptureRefused(StructureError):
    """A computation that cannot be captured as it is."""


class DataError(MicroLLMError, ValueError):
    """Training data that cannot be packed or read."""


class TrainingError(MicroLLMError, RuntimeError):
    """A run that must not go on: a number that is not finite, ranks that disagree, a rank that failed."""


class UnavailableError(MicroLLMError, RuntimeError):
    """Something this machine does not have."""


class MissingExtraError(UnavailableError):
    """An optional dependency is absent; the text names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"got no package {package!r}; {purpose} needs it; run: pip install 'microllm[{extra}]'")
        self.package, self.extra = package, extra
