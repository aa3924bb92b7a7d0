"""Request fields that several APIs share."""
