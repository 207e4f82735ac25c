/* The one way into the kernels: a record, or many of them one after the other. */
#include "program.h"

/* Returns 0, or 1 where memory ran out. */
int compress_call(const Call *call)
{
    switch (call->operation) {
    case CALL_LINEAR: return compress_linear((const LinearCall *)call);
    case CALL_NORM: compress_norm((const NormCall *)call); return 0;
    case CALL_HEAD_NORM: compress_head_norm((const HeadNormCall *)call); return 0;
    case CALL_GATE: compress_gate((const GateCall *)call); return 0;
    case CALL_ROTATE: compress_rotate((const RotateCall *)call); return 0;
    case CALL_STORE: compress_store((const StoreCall *)call); return 0;
    case CALL_ATTENTION: return compress_attention((const AttentionCall *)call);
    }
    return 1;
}

int compress_replay(const Call *const *calls, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (compress_call(calls[i]))
            return 1;
    return 0;
}
