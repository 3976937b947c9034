"""The meaning of the API: requests, prompts and answers in OpenAI's shape, and in Anthropic's."""
