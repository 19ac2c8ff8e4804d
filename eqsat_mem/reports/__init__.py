"""What users read about a plan: tables, explanations, timelines, the HTML page, progress."""
