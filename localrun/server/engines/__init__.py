"""Engine processes: which are loaded, where they fit, how they are started, watched and ended."""
