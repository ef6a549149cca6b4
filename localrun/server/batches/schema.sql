CREATE TABLE files (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  filename TEXT NOT NULL,
  purpose TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER);

CREATE INDEX files_of_owner ON files (owner, seq);

CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  api TEXT NOT NULL,
  endpoint TEXT NOT NULL,
  input_file_id TEXT NOT NULL,
  completion_window TEXT NOT NULL,
  status TEXT NOT NULL,
  ending TEXT NOT NULL,
  model TEXT,
  metadata TEXT,
  errors TEXT,
  output_file_id TEXT,
  error_file_id TEXT,
  output_expires_s INTEGER,
  created_at REAL NOT NULL,
  expires_at REAL NOT NULL,
  in_progress_at REAL,
  finalizing_at REAL,
  completed_at REAL,
  failed_at REAL,
  expired_at REAL,
  cancelling_at REAL,
  cancelled_at REAL,
  archived_at REAL,
  n_lines INTEGER NOT NULL DEFAULT 0,
  n_succeeded INTEGER NOT NULL DEFAULT 0,
  n_errored INTEGER NOT NULL DEFAULT 0,
  n_canceled INTEGER NOT NULL DEFAULT 0,
  n_expired INTEGER NOT NULL DEFAULT 0,
  n_input_tokens INTEGER NOT NULL DEFAULT 0,
  n_cached_tokens INTEGER NOT NULL DEFAULT 0,
  n_output_tokens INTEGER NOT NULL DEFAULT 0,
  n_thinking_tokens INTEGER NOT NULL DEFAULT 0,
  blob_bytes INTEGER NOT NULL DEFAULT 0);

CREATE INDEX batches_of_owner ON batches (owner, api, seq);

CREATE INDEX batches_open ON batches (seq) WHERE ending != 'done';

CREATE TABLE lines (
  batch INTEGER NOT NULL REFERENCES batches (seq) ON DELETE CASCADE,
  place INTEGER NOT NULL,
  line INTEGER NOT NULL,
  custom_id TEXT NOT NULL,
  model TEXT NOT NULL,
  offset INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  PRIMARY KEY (batch, place)) WITHOUT ROWID;

CREATE TABLE results (
  batch INTEGER NOT NULL,
  place INTEGER NOT NULL,
  kind INTEGER NOT NULL,
  body BLOB,
  PRIMARY KEY (batch, place),
  FOREIGN KEY (batch, place) REFERENCES lines (batch, place) ON DELETE CASCADE);
