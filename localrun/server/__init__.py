"""The daemon process.

Read in this order: `app.py` (the way in), `http/` (limits, and one exchange per request), `ollama/`, `openai/` and
`embedding/` (the APIs), `jobs/job.py` (one generation), `engines/supervisor.py` (which models are loaded),
`engines/link.py` (the pipe to an engine process), `templates/renderer.py` (prompts), `metering/` (what people see).
"""
