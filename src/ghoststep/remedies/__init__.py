"""What removes a cause: functions, wrappers and checkpoint edits, each usable on its own."""
