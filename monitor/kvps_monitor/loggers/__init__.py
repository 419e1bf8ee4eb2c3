"""What training curves are made of: a row for each version of a job, written to a file or a service as it is made."""
