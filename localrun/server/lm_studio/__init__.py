"""LM Studio's API, `/api/v0/*`: OpenAI's bodies and answers, with what it says of models and speeds besides."""
