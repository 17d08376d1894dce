"""What is to be drawn: Parquet files to rows that keep to the rules, and files of prompts to Parquet files."""
