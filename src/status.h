/* Failing with a sentence. */
#ifndef ATTN_STATUS_H
#define ATTN_STATUS_H

/* Stores the sentence for attn_last_error() of this thread (cut at 511 bytes)
 * and returns status, so that a check ends in `return attn__fail(...)`. */
attn_status attn__fail(attn_status status, const char *format, ...)
    ATTN__PRINTF(2, 3);

#endif
