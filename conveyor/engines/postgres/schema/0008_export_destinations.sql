-- Where the file of an export is put.
ALTER TABLE exports ADD COLUMN destination text;
ALTER TABLE exports ADD COLUMN destination_sealed text;
