def note_of(n, f): return ""
