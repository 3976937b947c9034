"""What the API means: requests, prompts and answers in OpenAI's shape, and in Anthropic's."""
