CREATE TABLE IF NOT EXISTS usage (
  day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
  requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL,
  PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS elsewhere (
  day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
  requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL, door TEXT NOT NULL,
  PRIMARY KEY (day, key, model, door)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS level (
  key_id TEXT NOT NULL, kind TEXT NOT NULL, per_s REAL NOT NULL, level REAL NOT NULL, at_s REAL NOT NULL,
  PRIMARY KEY (key_id, kind, per_s)
) WITHOUT ROWID;
