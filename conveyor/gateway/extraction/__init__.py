"""Extraction: makes data, markdown or plain text of a page, in processes of its own."""
