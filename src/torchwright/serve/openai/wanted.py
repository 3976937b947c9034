"""From the body of each kind of generating request to what is wanted of the engine, over HTTP and in batches."""

from __future__ import annotations

from torchwright.serve.api_error import invalid
from torchwright.serve.formats.answer import AnswerForm
from torchwright.serve.grammar.compile import GrammarJob
from torchwright.serve.openai.anthropic_request import MessagesRequest
from torchwright.serve.openai.conversation import Tools
from torchwright.serve.openai.prepare import ServedModel, Wanted, form_of
from torchwright.serve.openai.protocol import ChatRequest, CompletionRequest
from torchwright.serve.openai.responses import ResponsesRequest
from torchwright.serve.wire.messages import EngineReady


def of_chat(body: ChatRequest, model: ServedModel) -> Wanted:
    """Return what a conversation wants."""
    asked = body.asked_tools
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return Wanted(
        n=body.n,
        max_tokens=getattr(body, limit),
        max_tokens_param=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        form=_form(body, asked, model),
        thinking_tokens=body.thinking_tokens,
        stops=model.template.stops,
        answer=_answer_form(asked, model),
    )


def of_completion(body: CompletionRequest, ready: EngineReady) -> Wanted:
    """Return what a completion wants; raise `ApiError` (400) for what a model with an encoder does not do."""
    if body.stream and body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs is not streamed", "stream", "unsupported_parameter")
    if ready.answer is not None:
        _check_source(body)
    # A translation ends where the model ends it, unless its client says otherwise.
    whole = ready.answer is not None and "max_tokens" not in body.model_fields_set
    return Wanted(
        n=body.n,
        max_tokens=None if whole else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        form=form_of(body.form, body.response_format),
        continues=ready.answer is None,
    )


def of_response(body: ResponsesRequest, model: ServedModel) -> Wanted:
    """Return what a request of the Responses API wants."""
    asked = body.asked_tools
    return Wanted(
        max_tokens=body.max_output_tokens,
        max_tokens_param="max_output_tokens",
        form=_form(body, asked, model),
        stops=model.template.stops,
        answer=_answer_form(asked, model),
    )


def of_messages(body: MessagesRequest, model: ServedModel) -> Wanted:
    """Return what a request of Anthropic's API wants."""
    asked = body.asked_tools
    return Wanted(
        max_tokens=body.max_tokens,
        form=_form(body, asked, model),
        thinking_tokens=body.thinking_tokens,
        stops=model.template.stops,
        answer=_answer_form(asked, model),
    )


def _form(
    body: ChatRequest | ResponsesRequest | MessagesRequest, asked: Tools, model: ServedModel
) -> tuple[GrammarJob, str] | None:
    """Return the grammar of an answer and the field that asks for it."""
    form = form_of(body.form, body.response_format)
    if form is not None and not asked.required:
        return form
    calls = asked.grammar(model.tool_format)
    return form if calls is None else (calls, "tools")


def _answer_form(asked: Tools, model: ServedModel) -> AnswerForm:
    """Return how the model writes an answer to a conversation."""
    return AnswerForm(
        reasoning=model.reasoning,
        tools=model.tool_format,
        functions=asked.callable,
        parallel=asked.parallel,
    )


def _check_source(body: CompletionRequest) -> None:
    """Raise `ApiError` (400) for what a model with an encoder does not do."""
    if body.echo:
        raise invalid("the answer does not go on from the prompt", "echo", "unsupported_parameter")
    if form := form_of(body.form, body.response_format):
        raise invalid("this model keeps to no grammar", form[1], "unsupported_parameter")
