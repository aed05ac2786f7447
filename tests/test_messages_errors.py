"""Laws of the values that every room speaks, and of the errors."""

import dataclasses
import inspect
import pickle

import pytest

from trace_gym import errors
from trace_gym.errors import (
    BadInputError,
    InfrastructureError,
    MissingExtraError,
    TraceGymError,
    require,
    unknown_name,
)
from trace_gym.messages import Completion, Failure, Message, Request, ToolCall


@pytest.mark.parametrize(
    "message",
    [Message("user", "q"), Message("tool", "4", name="python"), Message("assistant", "", None)],
)
def test_a_message_survives_its_chat_form(message):
    """from_dict undoes to_dict."""
    assert Message.from_dict(message.to_dict()) == message


def test_a_message_without_a_name_has_no_name_in_its_chat_form():
    """Chat templates treat a name of None and no name differently."""
    assert Message("user", "q").to_dict() == {"role": "user", "content": "q"}


def test_a_tool_call_has_the_chat_form_of_transformers():
    """Arguments are an object, not a string, and a copy."""
    arguments = {"code": "1 + 1"}
    shown = ToolCall("python", arguments).to_dict()
    assert shown == {"type": "function", "function": {"name": "python", "arguments": {"code": "1 + 1"}}}
    shown["function"]["arguments"]["code"] = "2"
    assert arguments == {"code": "1 + 1"}


@pytest.mark.parametrize(
    "value",
    [
        Message("user", "q"),
        ToolCall("python"),
        Failure("deadline", "Too late."),
        Request(()),
        Completion("4"),
    ],
)
def test_values_are_frozen(value):
    """What was said stays said."""
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)


def test_a_failure_reads_as_kind_and_reason():
    """The form in which an environment's info carries it."""
    assert Failure("deadline", "Too late.").to_dict() == {"kind": "deadline", "reason": "Too late."}


def test_every_error_can_be_caught_as_one():
    """Whatever trace_gym raises on purpose derives from its base."""
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert len(found) >= 5
    assert all(issubclass(cls, TraceGymError) for cls in found)


def test_errors_are_also_what_python_calls_them():
    """Code that knows nothing of trace_gym catches them, too."""
    assert issubclass(BadInputError, ValueError)
    assert issubclass(MissingExtraError, ImportError)


def test_an_infrastructure_error_is_no_bad_input():
    """A dead sandbox must not be taken for the caller's or the agent's fault."""
    error = InfrastructureError("sandbox_died", "No answer.")
    assert not isinstance(error, ValueError)
    assert (error.kind, error.reason, str(error)) == (
        "sandbox_died",
        "No answer.",
        "sandbox_died: No answer.",
    )


def test_an_unknown_name_is_answered_with_the_nearest_and_all_others():
    """What was given, what is allowed, what was probably meant."""
    error = unknown_name("allocator", "tracee", ["uniform", "trace", "pcl"])
    assert isinstance(error, BadInputError)
    assert str(error) == "Unknown allocator 'tracee'. Did you mean 'trace'? Available: pcl, trace, uniform."


def test_a_long_list_of_names_is_cut_and_counted():
    """A corpus of task ids does not fill the screen."""
    message = str(unknown_name("task", "zzz", [f"task/{i:03}" for i in range(500)]))
    assert "(500 in all)" in message
    assert len(message) < 400


def test_a_missing_module_names_its_extra():
    """The remedy can be copied from the message."""
    with pytest.raises(MissingExtraError, match=r"pip install 'trace-gym\[train\]'"):
        require("no_such_module_of_ours", "train")


def test_an_installed_module_is_returned():
    """`require` is an import."""
    assert require("pickle", "train") is pickle
