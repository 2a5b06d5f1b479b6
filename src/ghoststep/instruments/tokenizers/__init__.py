"""Loading tokenizers from a checkpoint's files, one format a module. Nothing here runs code that a checkpoint brings."""
