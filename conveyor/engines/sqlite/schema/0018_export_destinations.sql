-- Where the file of an export is put.
ALTER TABLE exports ADD COLUMN destination TEXT;
ALTER TABLE exports ADD COLUMN destination_sealed TEXT;
