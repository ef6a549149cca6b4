"""The daemon process.

Read in this order: `app.py` (the way in), `http/` (limits, and one exchange per request), `openai/`, `ollama/`,
`anthropic/`, `embedding.py` and `native/` (the APIs), `prompting/prepare.py` (from a conversation to a prompt),
`jobs/job.py` (one generation), `engines/supervisor.py` (which models are loaded), `engines/link.py` (the pipe to an
engine process), `parsing/parser.py` (from text to tool calls), `workers.py` (the template worker),
`media/decoder.py` (pictures and sound, and their worker), `metering/` (what people see).
"""
