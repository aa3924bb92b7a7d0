"""Tool calls: prompts for models without tool templates, and parsers for the formats in which models write calls."""
