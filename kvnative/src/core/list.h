/* Intrusive doubly linked lists. An item has a kvn_node for each list that it can be in. The lock of a list also
 * guards its nodes. */
#ifndef KVNATIVE_CORE_LIST_H
#define KVNATIVE_CORE_LIST_H

#include <stdbool.h>
#include <stddef.h>

/* All zero while in no list. */
typedef struct kvn_node {
    struct kvn_node *next;
    struct kvn_node *previous;
} kvn_node;

/* A ring through `ends`, which stays in place. */
typedef struct kvn_list {
    kvn_node ends;
} kvn_list;

/* The struct that has the node as its member; NULL for NULL. */
#define KVN_LISTED(node, type, member)                                                             \
    ((type *)kvn_listed((node), offsetof(type, member)))

static inline void *kvn_listed(const kvn_node *node, size_t offset)
{
    return node ? (char *)node - offset : NULL;
}

static inline void kvn_list_init(kvn_list *list) { list->ends.next = list->ends.previous = &list->ends; }

static inline bool kvn_list_is_in(const kvn_node *node) { return node->next != NULL; }

/* NULL at the end of the list. */
static inline kvn_node *kvn_list_after(const kvn_list *list, const kvn_node *node)
{
    return node->next != &list->ends ? node->next : NULL;
}

static inline kvn_node *kvn_list_first(const kvn_list *list)
{
    return kvn_list_after(list, &list->ends);
}

/* No effect on a node in no list. */
static inline void kvn_list_remove(kvn_node *node)
{
    if (!kvn_list_is_in(node))
        return;
    node->previous->next = node->next;
    node->next->previous = node->previous;
    node->next = node->previous = NULL;
}

static inline void kvn_list_insert(kvn_node *before, kvn_node *node)
{
    node->next = before->next;
    node->previous = before;
    before->next->previous = node;
    before->next = node;
}

/* Moves the node if it is in the list already. */
static inline void kvn_list_push_front(kvn_list *list, kvn_node *node)
{
    kvn_list_remove(node);
    kvn_list_insert(&list->ends, node);
}

static inline void kvn_list_push_back(kvn_list *list, kvn_node *node)
{
    kvn_list_remove(node);
    kvn_list_insert(list->ends.previous, node);
}

#endif
