"""Answers that need no engine: the token ids of a text or conversation, and back."""

from __future__ import annotations

import msgspec

from torchwright.serve.openai.anthropic_request import CountTokensRequest
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.language import Language
from torchwright.serve.openai.protocol import DetokenizeRequest, TokenizeRequest
from torchwright.serve.openai.request_limits import RequestLimits, check_ids, check_text

Asked = TokenizeRequest | DetokenizeRequest | CountTokensRequest


def answer(body: Asked, language: Language, limits: RequestLimits, most: int) -> bytes:
    """The answer as JSON; at most `most` characters are tokenized. Raises `ApiError` (400)."""
    tokenizer = language.tokenizer
    if isinstance(body, DetokenizeRequest):
        check_ids(body.tokens, limits, "tokens")
        return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, special=True)})
    if isinstance(body, CountTokensRequest):
        prompts = body.read(language)
        [text] = prompts.items
        assert isinstance(text, str), "a conversation is a text"
        check_text(text, tokenizer, None, most, prompts.param)
        return msgspec.json.encode({"input_tokens": len(tokenizer.encode(text, special=prompts.special))})
    text, special, param = body.prompt, body.add_special_tokens, "prompt"
    if body.messages is not None:
        asked = Tools(functions=[tool.function for tool in body.tools or []], choice="auto")
        start, extra = body.add_generation_prompt, body.chat_template_kwargs
        text = prompt_text(language.template, body.messages, asked, add_generation_prompt=start, extra=extra)
        special, param = language.template.plain, "messages"
    assert text is not None, "the request has a prompt or messages"
    check_text(text, tokenizer, None, most, param)
    ids = tokenizer.encode(text, special=special)
    strings = [tokenizer.token(id)[0] for id in ids] if body.return_token_strs else None
    return msgspec.json.encode(
        {"count": len(ids), "max_model_len": limits.context, "tokens": ids, "token_strs": strings}
    )
