"""What happened, for people: status, report.json, report.html, contact sheet and dataset card."""
