"""The journal of a run: an append-only log of its events, and the states that follow from them.

events             everything that is ever written
event_records      the stored form of events, with their checksums
blobs              the packed arrays of a turn
json_values        JSON values, checked when they enter the journal
states             the states of tasks, rollouts, attempts, steps and resources
transitions        the legal transitions, and the states that events lead to
journal            writing and reading, whatever the storage
memory             a journal that ends with the process
sql                a journal in a database
tables             its tables and statements
sqlite, postgres   the differences between the databases
deferred_signals   signals that wait until a write is over
"""
