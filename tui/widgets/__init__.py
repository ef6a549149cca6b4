"""The parts that screens are made of, one per file. A widget shows what it is handed; none of them talks HTTP except
`conversation_view`, which reads the answer it displays."""
