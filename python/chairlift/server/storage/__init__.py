"""What must survive a restart: uploaded files and batches, in one directory."""
