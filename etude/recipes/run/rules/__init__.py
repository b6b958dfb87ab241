"""The rules across options: runs that are refused or warned of before anything is loaded."""
