"""OpenAI's responses: `/v1/responses`, with the conversations kept that `previous_response_id` goes on with."""
