"""The four kinds of error that a user of Leone can see.

Each message is one line that names the next step.
"""


class LeoneError(Exception):
    """Base of everything that Leone raises on purpose."""


class ModelError(LeoneError):
    """The file cannot be used: format, family, missing or misshapen tensors, tokenizer."""


class DeviceError(LeoneError):
    """The GPU, its driver or the built kernels cannot do what was asked."""


class RequestError(LeoneError):
    """A request is wrong. `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, message, status=400, code="invalid_request", param=None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def require(condition, problem, status=400, code="invalid_request", param=None):
    """RequestError unless the condition holds."""
    if not condition:
        raise RequestError(problem, status, code, param)


class Overloaded(RequestError):
    """There is no room now; try again after `retry_after_ms` milliseconds."""

    def __init__(self, message, needed_pages, free_pages, retry_after_ms, code="kv_capacity"):
        super().__init__(message, status=429, code=code)
        self.needed_pages, self.free_pages = needed_pages, free_pages
        self.retry_after_ms = retry_after_ms
