"""What developers measure: localrun against llama-server (`python -m bench`) and against a bare loop."""
