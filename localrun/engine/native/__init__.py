"""The llama.cpp library; nothing else of localrun touches it."""
