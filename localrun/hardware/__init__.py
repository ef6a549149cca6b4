"""What this machine computes with: its processors, the build of llama.cpp, and what was found out about both."""
