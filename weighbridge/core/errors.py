"""Every error that Weighbridge raises on purpose.

    WeighbridgeError
    ├── ConfigError          the configuration file, a flag or an environment value
    ├── InputError           a file or value a person handed over
    │   ├── TraceError       a workload trace
    │   ├── LogError         an event log
    │   ├── ProfileError     a profile file
    │   └── CheckpointError  a model selector's checkpoint
    ├── PolicyError          unknown policy, bad policy option, or a policy that broke its contract
    ├── ModelError           a model file or the inference library
    ├── RequestError         a client's request; carries HTTP status, type, code and param
    ├── UpstreamError        an engine that did not answer as its protocol says
    └── ServiceError         a listener, process or resource of our own (port taken, child died)

A message names what was wrong, where, and what to do; it never holds a key or prompt text.
"""

from __future__ import annotations


class WeighbridgeError(Exception):
    """Base of all; `exit_code` is what the command line exits with."""

    exit_code = 1


class ConfigError(WeighbridgeError):
    """A setting was refused. `source` is the file or flag, `path` the place inside it, such as `$.instances[0].url`."""

    exit_code = 2

    def __init__(self, message: str, *, source: str = "", path: str = "") -> None:
        self.source, self.path = source, path
        where = ": ".join(part for part in (source, path) if part)
        super().__init__(f"{where}: {message}" if where else message)


class InputError(WeighbridgeError):
    """Something a person handed over cannot be used."""

    exit_code = 2


class TraceError(InputError):
    """A row of a trace is bad; the message holds file, line and column."""


class LogError(InputError):
    """An event log cannot be read."""


class ProfileError(InputError):
    """A profile file is corrupt, of a future version, or made for something else."""


class CheckpointError(InputError):
    """A selector's checkpoint is damaged, of another version, or made for another pool of models."""


class PolicyError(WeighbridgeError):
    """A policy is unknown, got a bad option, or broke its contract. `option`: the option that was refused, `*` where
    it may be any of them, None where the fault is not with the options."""

    exit_code = 2

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class ModelError(WeighbridgeError):
    """A model file or the inference library cannot be used."""


class RequestError(WeighbridgeError):
    """A client's request was refused. Fields follow OpenAI's error envelope."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.type, self.code, self.param = message, status, type, code, param
        self.retry_after_s = retry_after_s


class UpstreamError(WeighbridgeError):
    """An engine did not answer as its protocol says, or not at all."""


class ServiceError(WeighbridgeError):
    """A part of our own could not run: a port is taken, a child process died."""
