"""Places that hold versions of a job: base containers, directories, URLs. Every one of them is a `VersionStore`."""
