"""`conveyor scrape`: fetches a list of URLs into a folder, without a server or an account
(docs/scrape.md).

The folder is the store of record. A page is written under a temporary name and renamed; then its
line is appended to results.jsonl. A page counts as done when its line is there and its file has
the size that the line says, so an interrupted command resumes from these two alone.
"""
